"""The service's own tests, made to be read: `pytest example_project/tests`, from the checkout."""
