from celery_safe_effects.contrib.flower import install

install()
