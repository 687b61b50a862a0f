"""Systems Manager's sessions: amazon.aws.aws_ssm that never runs a command twice and never waits for ever."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible_collections.amazon.aws.plugins.connection import aws_ssm
from botocore.exceptions import BotoCoreError, ClientError

# The options are the parent's; Ansible looks for them in the plugin's own module.
globals()["DOCUMENTATION"] = aws_ssm.DOCUMENTATION

# AWS's client waits without end where its data channel is refused, and a command's limit may be an hour.
_OPEN_S = 60.0
_CLOSE_S = 10.0
_LOOK = "look at the host, or set ansible_aws_ssm_timeout higher"
_REACH = "grant docs/policies/session.json, let the controller reach ssmmessages, or look at the host's agent"
# The parent's own way to fetch or put a file: the URL is signed and, with temporary keys, holds their session token.
_SIGNED = re.compile(r"\Acurl (?P<before>.*?)'(?P<url>https?://[^'\s]+)'(?P<after>.*)\Z", re.DOTALL)
_MENDS = {
    "TargetNotConnected": "start the agent (amazon-ssm-agent) and give the instance a profile with a role for it",
    "ExpiredTokenException": "renew the credentials, then run this again",
    "AccessDeniedException": "grant docs/policies/session.json to the controller",
}


def without_signed_argument(cmd: str) -> str:
    """A `curl` that gets its signed URL on standard input: arguments are there for every user of the host to read."""
    found = _SIGNED.match(cmd)
    if found is None:
        return cmd
    # printf is the shell's own, so no process has the URL for an argument.
    return f"printf 'url = \"%s\"\\n' '{found['url']}' | curl --config - {found['before']}{found['after']}"


class Connection(aws_ssm.Connection):  # type: ignore[misc]
    """A session with one instance; a command ends after `ansible_aws_ssm_timeout` seconds of wall clock."""

    transport = "ssm_session"
    session_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The parent reads its option before any is set, and its retries run a command again that may have been run.
        self.reconnection_retries = 0

    def get_executable(self) -> str:
        """The path of the session-manager-plugin."""
        try:
            return str(super().get_executable())
        except AnsibleError as error:
            raise self._failure(
                f"the session-manager-plugin is missing: {error.message}",
                "install it on the controller, see docs/sessions.md, or set AWS_SESSION_MANAGER_PLUGIN to its path",
            ) from error

    def start_session(self) -> None:
        """Opens the session unless it is open; all that AWS refuses makes the host unreachable."""
        if self.session_manager is not None:
            return
        if not self.get_option("bucket_name"):
            raise self._failure("no bucket for files", "set vllm_fleet_bucket, e.g. -e vllm_fleet_bucket=NAME")
        try:
            with self._limit("the session did not open", _OPEN_S, _REACH):
                super().start_session()
        except ClientError as error:
            self.session_manager = None
            code = error.response["Error"]["Code"]
            mend = _MENDS.get(code, "see what AWS says of this error")
            raise self._failure(f"the session was refused: {error}", mend) from error
        except BotoCoreError as error:
            self.session_manager = None
            raise self._failure(f"no session: {error}", "check the region, credentials and network") from error

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> Any:
        """The command's exit code, output and errors; the time that the session takes to open is its own."""
        self._connect()
        cmd = without_signed_argument(cmd)
        what = "the command did not end, it was sent once and is not sent again"
        with self._limit(what, float(self.get_option("ssm_timeout")), _LOOK):
            return super().exec_command(cmd, in_data=in_data, sudoable=sudoable)

    def exec_communicate(self, *args: Any, **kwargs: Any) -> tuple[int, str, str]:
        """The parent's; a session that ends before the command is a failure."""
        code, stdout, stderr = super().exec_communicate(*args, **kwargs)
        # From 11 on the parent takes the last line for the exit code where the client left before the end mark.
        if code is None or self.session_manager.session.poll() is not None:
            raise OSError("the session ended before the command")
        return code, stdout, stderr

    def close(self) -> None:
        """Ends the session; its client is given some seconds for it."""
        manager = getattr(self, "_session_manager", None)
        if manager is None:
            return
        timer = threading.Timer(_CLOSE_S, self._kill_client, [manager])
        timer.daemon = True
        timer.start()
        try:
            super().close()
        except (OSError, ClientError, BotoCoreError) as error:
            self.verbosity_display(2, f"session not closed in order: {error}")
        finally:
            timer.cancel()
            self._session_manager = None

    @contextmanager
    def _limit(self, what: str, limit_s: float, mend: str) -> Iterator[None]:
        """Ends the session's client when the time is over: whatever waits for its output then returns."""
        over, done = threading.Event(), threading.Event()

        def end() -> None:
            # Again and again: the client may only begin when the time is over.
            while not done.wait(0.5 if over.is_set() else limit_s):
                over.set()
                self._kill_client(self.session_manager)

        threading.Thread(target=end, daemon=True).start()
        try:
            yield
        except (AnsibleConnectionFailure, OSError) as error:
            if isinstance(error, AnsibleConnectionFailure) and "mend:" in str(error):
                raise
            done.set()
            self._kill_client(self.session_manager)
            self.close()
            if over.is_set():
                raise self._failure(f"{what} within {limit_s:g} s", mend) from error
            if isinstance(error, AnsibleConnectionFailure):
                raise self._failure(f"{what} within {self.get_option('ssm_timeout')} s", mend) from error
            raise self._failure(f"the session broke: {error}", "look at the host and its agent") from error
        finally:
            done.set()

    @staticmethod
    def _kill_client(manager: Any) -> None:
        if manager is None or manager.session is None:
            return
        if manager._process_mgr is not None:
            # Without it the parent would say goodbye to a client that is gone, and wait.
            manager._process_mgr._has_timeout = True
        manager.session.kill()

    def _failure(self, what: str, mend: str) -> AnsibleConnectionFailure:
        return AnsibleConnectionFailure(f"session: {what}\n  where: {self.instance_id}\n  mend:  {mend}")
