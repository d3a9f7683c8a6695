"""Alerting rules and a dashboard: ``safe-effects metrics --rules`` and ``--dashboard`` print them."""
