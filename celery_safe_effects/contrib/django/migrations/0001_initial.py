"""Makes the schema. Going back leaves it: it is the record of what happened, and to be dropped by hand."""

from django.db import migrations

from celery_safe_effects.contrib.django.schema import upgrade


class Migration(migrations.Migration):
    """The library's migration 1."""

    operations = [migrations.RunPython(upgrade, migrations.RunPython.noop)]  # noqa: RUF012 - Django's own form
