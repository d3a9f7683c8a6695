"""Ends the process that imports it."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
