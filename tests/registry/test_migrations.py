from __future__ import annotations

import subprocess
import sys
from importlib import resources

from alembic.config import Config
from alembic.script import ScriptDirectory

from weightyard.registry import migrate


def test_each_migration_is_named_by_its_revision_and_the_newest_is_the_head() -> None:
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    scripts = ScriptDirectory.from_config(config)
    assert {script.revision for script in scripts.walk_revisions()} == migrate._known()
    assert migrate.newest() == scripts.get_current_head()


def test_opening_a_yard_that_is_up_to_date_does_not_load_alembic(tmp_path: object) -> None:
    script = f"""
import sys
from weightyard.yard import open_yard
open_yard({str(tmp_path)!r}).close()
for name in [name for name in sys.modules if name.startswith("alembic")]:
    del sys.modules[name]
open_yard({str(tmp_path)!r}).close()
print("alembic" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr
