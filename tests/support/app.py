"""The application that the test workers run, with the settings that the environment carries."""

from __future__ import annotations

import json
import os

from tests.support.fault_tasks import install_deaths
from tests.support.names import CONF_VARIABLE
from tests.support.older_kombu import restore_as_told
from tests.support.pool_tasks import tell_of_revokes
from tests.support.tasks import create_app

restore_as_told()
app = create_app(json.loads(os.environ[CONF_VARIABLE]))
install_deaths()
if "SAFE_EFFECTS_TEST_REVOKES" in os.environ:
    tell_of_revokes()
if "SAFE_EFFECTS_TEST_SPANS" in os.environ:
    from tests.support.spans import write_spans

    write_spans(app, os.environ["SAFE_EFFECTS_TEST_SPANS"])
