"""A file without checksums of its own that is damaged on every replica, read as users do."""

from __future__ import annotations

import os

import pytest
from patience import be_patient

from weightyard.errors import ReplicasDamaged
from weightyard.names import UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.opening import open_store
from weightyard.storage.store import FileOptions
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.transfer.once import read_whole

CONTENT = os.urandom(1000)


@pytest.mark.cluster
@pytest.mark.long  # a DataNode that serves by HTTP looks for a good replica for long
def test_a_record_that_is_damaged_on_every_replica_is_called_damaged_and_they_are_named(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    settings = Settings(hadoop_conf_dir=cluster.conf_dir, hadoop_home=None, libhdfs_dir=None)
    with open_store(cluster.fresh_dir(), settings) as store:
        store.init()
        staging = layout.staging(UploadId.new(), "yard")
        with store.stage(staging, FileOptions(replication=2)) as stage:
            stage.write(CONTENT)
            store.publish(stage.close(), layout.YARD)
        url = f"{store.url}/{layout.YARD}"
        cluster.wait_for_replication(url, 2)
        assert read_whole(store, layout.YARD) == CONTENT
        files = cluster.replica_files(url)
        for file in files:
            damage(file, offset=17)
        with pytest.raises(ReplicasDamaged) as caught:
            read_whole(store, layout.YARD)
    assert all(file.datanode.plan.address in str(caught.value) for file in files)
