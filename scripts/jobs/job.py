"""`Job`: a command on several machines, as every engine's starter takes it."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd.errors import LaunchError
from spmd.launch import EXIT_PREEMPTED
from spmd.launch.restart import ENV_MAX_RESTARTS, ENV_RESTART, EXIT_REFUSED

COORDINATOR_PORT = 8476
"""Where process 0 listens if nothing else is asked for; Cloud TPU's default, too."""

NOT_AGAIN = (2, EXIT_REFUSED)
"""Exit codes of a command that would end in the same way if it was started again: the first is that
of flags that cannot be read."""

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Job:
    """A command on several machines."""

    command: tuple[str, ...]  # the program and its arguments, as they would be typed on one machine
    name: str = "spmd"  # the job's name
    nodes: int = 1  # how many machines
    # processes on each: 1 with all of its accelerators, or one for each
    processes_per_node: int = 1
    gpus_per_node: int = 0  # GPUs of each machine
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of every process
    # where the command runs; if left out, the folder that the job was started from
    folder: str | None = None
    port: int = COORDINATOR_PORT  # where process 0 listens

    def __post_init__(self) -> None:
        check_command(self.command)
        check_numbers(self, 1, "nodes", "processes_per_node")
        check_numbers(self, 0, "gpus_per_node")
        if self.gpus_per_node and self.processes_per_node not in (1, self.gpus_per_node):
            raise LaunchError(
                f"{self.processes_per_node} processes cannot share {self.gpus_per_node} GPUs here",
                required=f"1 process per node, or {self.gpus_per_node}: one for each GPU",
                fix="change --processes_per_node",
            )
        for name in self.env:
            if not _ENV_NAME.fullmatch(name):
                raise LaunchError(f"--env: {name!r} is no name of an environment variable")

    @property
    def processes(self) -> int:
        """How many processes there are in all."""
        return self.nodes * self.processes_per_node

    @property
    def shell_command(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.command)

    @property
    def all_gpus(self) -> str:
        """The ids of a node's GPUs, for a single process that is to have them all."""
        return ",".join(map(str, range(self.gpus_per_node)))


def check_command(command: Sequence[str]) -> None:
    """Raises `LaunchError` if there is none."""
    if not command:
        raise LaunchError(
            "there is no command to run", fix="end the flags with -- and give the command after it"
        )


def check_numbers(given: object, least: int, *names: str) -> None:
    """Raises `LaunchError` for a number, by its name, that is too small; None is not."""
    for name in names:
        number = getattr(given, name)
        if number is not None and number < least:
            raise LaunchError(f"--{name} must be at least {least}, not {number}")


def parse_env(items: Sequence[str], here: Mapping[str, str]) -> dict[str, str]:
    """`["A=1", "B"]` -> A is 1 and B is what it is here.

    Raises:
      LaunchError: a variable without a value that is not set here.
    """
    env = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals and name not in here:
            raise LaunchError(
                f"--env {name}: the variable is not set here", fix=f"give a value: --env {name}=..."
            )
        env[name] = value if equals else here[name]
    return env


def restarted(command: str, max_restarts: int) -> str:
    """A loop of the shell that starts a command again when it fails; then `$code` is its exit code.

    What ended well is not started again, nor what stopped because it was asked to, or would end in
    the same way.
    """
    ends = "|".join(map(str, (0, EXIT_PREEMPTED, *NOT_AGAIN)))
    return (
        f"export {ENV_MAX_RESTARTS}={max_restarts}; for {ENV_RESTART} in $(seq 0 {max_restarts}); "
        f"do export {ENV_RESTART}; {command}; code=$?; case $code in {ends}) break;; esac; done"
    )


def check_dns_label(what: str, name: str, longest: int = 63) -> None:
    """Raises `LaunchError` unless a name can be one of a Kubernetes object (DNS-1123 label)."""
    if len(name) <= longest and _DNS_LABEL.fullmatch(name):
        return
    raise LaunchError(
        f"{what} {name!r} is no name that Kubernetes takes",
        required=f"at most {longest} of a-z, 0-9 and -, neither first nor last a -",
        fix="choose another name",
    )


def exports(env: Mapping[str, str]) -> list[str]:
    """Shell lines that set variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
