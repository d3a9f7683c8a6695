"""Makes the table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """As `makemigrations` writes it."""

    initial = True
    operations = [  # noqa: RUF012 - Django's own form
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.CharField(max_length=50, primary_key=True, serialize=False)),
                ("cents", models.IntegerField()),
                ("ref", models.CharField(default="", max_length=50)),
            ],
        ),
    ]
