"""Environment variables that carry a test's settings to its workers."""

CONF_VARIABLE = "SAFE_EFFECTS_TEST_CONF"  # Celery's settings and ours, as JSON
PROVIDER_VARIABLE = "SAFE_EFFECTS_TEST_PROVIDER_URL"
DEATH_VARIABLE = "SAFE_EFFECTS_TEST_DEATH"  # place|job id|marker file: where a worker kills itself, once
