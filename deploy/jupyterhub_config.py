"""JupyterHub for the course. `make hub` starts it; what differs from place to place stands in a site file."""

import html
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import site_file  # noqa: E402
from batchspawner import SlurmSpawner  # noqa: E402
from traitlets import Unicode  # noqa: E402

os.umask(0o077)  # logs of trainees' jobs too are for themselves
c = get_config()  # noqa: F821  (JupyterHub's)
HERE = Path(__file__).resolve().parent
PYTHON, BIN = sys.executable, Path(sys.executable).parent
PROXY = BIN / "configurable-http-proxy"
try:
    SITE = site_file.read(Path(os.environ.get("DLOJZ_SITE") or HERE / "site.toml"))
    if not PROXY.exists():
        raise ValueError(f"{PROXY} is missing: {PYTHON} -m pip install configurable-http-proxy")
except ValueError as error:
    sys.exit(f"hub: {error}")
SLURM = SITE["servers"] == "slurm"
AS_ROOT = os.getuid() == 0
FOLDER = Path(SITE["folder"])
FOLDER.mkdir(parents=True, exist_ok=True)
FOLDER.chmod(0o700)

# ---- where it listens: this machine alone, but for what the nodes of a cluster must reach
c.JupyterHub.bind_url = f"http://127.0.0.1:{SITE['port']}/"
c.JupyterHub.hub_ip = SITE["hub_address"]
c.JupyterHub.hub_port = SITE["port"] + 1
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{SITE['port'] + 2}"
c.ConfigurableHTTPProxy.command = [PYTHON, str(HERE / "proxy.py")]
c.ConfigurableHTTPProxy.pid_file = str(FOLDER / "proxy.pid")
c.JupyterHub.db_url = f"sqlite:///{FOLDER / 'hub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(FOLDER / "cookie_secret")

# ---- who may come in, with the password of this machine
users, groups = set(SITE["users"]), set(SITE["groups"])
if not AS_ROOT and not SLURM:  # who is not root can start no server for others
    import getpass

    users, groups = {getpass.getuser()}, set()
c.JupyterHub.authenticator_class = "pam"
c.Authenticator.allow_all = not users and not groups
c.Authenticator.allowed_users = users
c.LocalAuthenticator.allowed_groups = groups
c.Authenticator.admin_users = set(SITE["admins"])
c.Authenticator.blocked_users = {"root"}

# ---- the trainees' servers
c.JupyterHub.shutdown_on_logout = True  # who leaves frees the node
c.Spawner.environment = SITE["environment"] | ({"DLOJZ_DATA": SITE["data"]} if SITE["data"] else {})
c.Spawner.start_timeout = 600  # a job may have to wait for its turn
c.Spawner.http_timeout = 180
c.JupyterHub.load_roles = [
    {
        "name": "idle",
        "services": ["idle"],
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
    }
]
idle = max(1, round(60 * SITE["idle_minutes"]))
culler = [PYTHON, "-m", "jupyterhub_idle_culler", f"--timeout={idle}", f"--cull-every={min(60, max(1, idle // 3))}"]
c.JupyterHub.services = [{"name": "idle", "command": culler}]


class OnSlurm(SlurmSpawner):
    """A server in a job. It says where it listens; all else comes from the profile that the trainee has chosen."""

    ip = Unicode("127.0.0.1" if SITE["node_address"] == "127.0.0.1" else "0.0.0.0").tag(config=True)

    def state_gethost(self):
        """Where the hub reaches the node."""
        return SITE["node_address"] or super().state_gethost()


def form(spawner) -> str:
    """What a trainee reads, and chooses, before the server starts."""
    rows = [
        f'<label style="display:block;font-weight:normal"><input type="radio" name="profile" '
        f'value="{html.escape(name)}"{" checked" * (not k)}> <b>{html.escape(name)}</b>: '
        f"{html.escape(site_file.in_words(profile))}</label>"
        for k, (name, profile) in enumerate(SITE["profiles"].items() if SLURM else ())
    ]
    disk = ""
    if (home := Path(f"~{spawner.user.name}").expanduser()).is_dir():
        disk = f" {shutil.disk_usage(home).free / 1e9:,.0f} GB are free in your home."
    if not SLURM:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        rows.append(f"<p>This machine has {os.cpu_count()} cores and {memory:.0f} GB of memory, for all of you.</p>")
    rows.append(
        f"<p>Your notebooks are in <code>{html.escape(SITE['work'])}</code>.{disk} A server that nobody uses ends "
        f"after {SITE['idle_minutes']:g} minutes; what is saved stays.</p>"
    )
    return "\n".join(rows)


def chosen(spawner):
    """The lines of the job; what a trainee sends beside the name of a profile is nothing to us."""
    name = spawner.user_options.get("profile")
    profile = SITE["profiles"].get(name) or next(iter(SITE["profiles"].values()))
    spawner.user_options = {"profile": name}
    spawner.req_options = site_file.sbatch_lines(profile)


c.Spawner.options_form = form
c.Spawner.options_from_form = lambda sent: {"profile": sent.get("profile", [""])[0]}
if SLURM:
    c.JupyterHub.spawner_class = OnSlurm
    c.Spawner.pre_spawn_hook = chosen
    c.Spawner.env_keep = ["PATH", "LANG", "LC_ALL", "SLURM_CONF"]
    c.Spawner.cmd = [str(HERE / "singleuser.py"), SITE["work"]]
    c.OnSlurm.batchspawner_singleuser_cmd = f"{PYTHON} -m batchspawner.singleuser"
    c.OnSlurm.exec_prefix = "runuser -u {username} --" if AS_ROOT else "sudo -E -u {username}"
    c.OnSlurm.batch_script = """#!/bin/bash
#SBATCH --job-name=dlojz-hub
#SBATCH --output={{homedir}}/dlojz-hub.log
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
{{options}}
umask 077
exec {{cmd}}
"""
else:
    c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"
    c.Spawner.env_keep = ["PATH", "LANG", "LC_ALL"]
    c.Spawner.cmd = [PYTHON, str(HERE / "singleuser.py"), SITE["work"]]
