"""Time for daemons on a busy machine, where a test is not about how little of it they are given."""

from __future__ import annotations

import pytest
from waiting import SOON_S

from weightyard import via
from weightyard.storage.hdfs.datanode import DataNodeReader

PATIENT = f"""
from weightyard import via
from weightyard.storage.hdfs.datanode import DataNodeReader
DataNodeReader.__init__.__kwdefaults__["stall_s"] = via._PROBE_S = {SOON_S}
"""
"""The same for a program: its first lines."""


def be_patient(patched: pytest.MonkeyPatch) -> None:
    """From now on a DataNode that is silent for a while has not failed, nor a store that is slow.

    Bytes would come another way than the one that is looked at.
    """
    defaults = DataNodeReader.__init__.__kwdefaults__
    assert defaults is not None
    patched.setitem(defaults, "stall_s", SOON_S)
    patched.setattr(via, "_PROBE_S", SOON_S)
