"""A Kerberos KDC on this machine, so that a cluster can ask who someone really is."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightyard.errors import ClusterFailed
from weightyard.settings import Settings
from weightyard.testing.cluster.configuration import Properties
from weightyard.testing.cluster.daemon import ENVIRONMENT, tail
from weightyard.testing.cluster.jars import class_path, kdc_home
from weightyard.testing.cluster.java import QUICK_START, Java, find_java
from weightyard.testing.cluster.observed import POLL_S
from weightyard.testing.cluster.processes import Leash

USER = "alice"
"""Whom clients log in as."""

_REALM = "EXAMPLE.COM"
_SERVICE, _WEB = "hdfs/localhost", "HTTP/localhost"
_SETTINGS = """\
org.name=EXAMPLE
org.domain=COM
kdc.bind.address=127.0.0.1
kdc.port=0
transport=TCP
debug=false
"""
_SECRET = "secret"
"""A file; by its content daemons know cookies for their own that say who logged in."""
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Kdc:
    """A KDC that runs, and what its clients and the daemons are told."""

    folder: Path

    @property
    def keytab(self) -> Path:
        """The keys of everyone: of the daemons, and of `USER`."""
        return self.folder / "keytab"

    @property
    def jvm_options(self) -> tuple[str, ...]:
        """What daemons need to find the KDC."""
        return (*QUICK_START, f"-Djava.security.krb5.conf={self.folder}/krb5.conf")

    @property
    def environment(self) -> Mapping[str, str]:
        """What MIT's library, and so a client, needs to log in as `USER` by itself."""
        return {
            "KRB5_CONFIG": f"{self.folder}/client.conf",
            "KRB5_CLIENT_KTNAME": f"FILE:{self.keytab}",
            "KRB5CCNAME": f"FILE:{self.folder}/tickets",
        }

    def properties(self, protection: str | None = "authentication") -> Properties:
        """What makes a cluster ask for tickets, and its DataNodes for SASL of this strength.

        None: for none, as those do whose ports only root could have opened.
        """
        sasl = {} if protection is None else {"dfs.data.transfer.protection": protection}
        service, web, keytab = f"{_SERVICE}@{_REALM}", f"{_WEB}@{_REALM}", str(self.keytab)
        return {
            "hadoop.security.authentication": "kerberos",
            "hadoop.security.authorization": "true",
            "dfs.namenode.kerberos.principal": service,
            "dfs.namenode.keytab.file": keytab,
            "dfs.datanode.kerberos.principal": service,
            "dfs.datanode.keytab.file": keytab,
            "dfs.web.authentication.kerberos.principal": web,
            "dfs.web.authentication.kerberos.keytab": keytab,
            **sasl,
            "dfs.permissions.superusergroup": "team",  # alice is of it
            # Else a DataNode wants ports below 1024, or HTTPS and so certificates.
            "ignore.secure.ports.for.testing": "true",
        }

    @property
    def web_properties(self) -> Properties:
        """What makes WebHDFS ask for tickets, too; it is known to them as `localhost`."""
        return {
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.kerberos.principal": f"{_WEB}@{_REALM}",
            "hadoop.http.authentication.kerberos.keytab": str(self.keytab),
            "hadoop.http.authentication.signature.secret.file": str(self.folder / _SECRET),
            # By which the cluster's own handles see how its daemons are.
            "hadoop.http.authentication.kerberos.endpoint.whitelist": "/jmx",
        }


@contextmanager
def running_kdc() -> Iterator[Kdc]:
    """Hadoop's MiniKdc (Apache Kerby) in a process of its own, gone when the context is left.

    with running_kdc() as kdc, MiniCluster(
        block_tokens=True, properties=kdc.properties(), jvm_options=kdc.jvm_options
    ) as cluster:
        ...  # clients that run with kdc.environment are alice
    """
    settings = Settings()
    java = Java(find_java(settings.java_home), tuple(class_path(kdc_home(settings.cache))))
    kdc = Kdc(Path(tempfile.mkdtemp(prefix="weightyard-kdc-")))
    told, log = kdc.folder / "settings", kdc.folder / "log"
    with closing(Leash(kdc.folder)) as leash:
        told.write_text(_SETTINGS)
        (kdc.folder / _SECRET).write_text(secrets.token_hex(32))
        command = java.command(
            "org.apache.hadoop.minikdc.MiniKdc",
            kdc.folder / "conf",
            *map(str, (kdc.folder, told, kdc.keytab)),
            *(_SERVICE, _WEB, USER),
        )
        with log.open("wb") as output:
            process = leash.start(command, log=output, env=ENVIRONMENT, cwd=kdc.folder)
        try:
            _wait_until_running(process, log)
            _write_client_configuration(kdc.folder)
            yield kdc
        finally:
            process.kill()
            process.wait()


def _wait_until_running(process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + _START_TIMEOUT_S
    # Said last: the port is open then and the keytab written.
    while b"Standalone MiniKdc Running" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > give_up:
            raise ClusterFailed(f"the KDC did not start:\n{tail(log)}")
        time.sleep(POLL_S)


def _write_client_configuration(folder: Path) -> None:
    made = (folder / "krb5.conf").read_text()
    # A look-up would turn localhost into a name of this host, which no key is for.
    rules = ("dns_canonicalize_hostname = false", "rdns = false", "dns_lookup_kdc = false")
    known = "\n    ".join(("[libdefaults]", *rules))
    (folder / "client.conf").write_text(made.replace("[libdefaults]", known))
