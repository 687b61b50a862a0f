"""`./runner.py bench leaks`: secrets are planted, a host goes through its whole life, and all is searched for them."""

from __future__ import annotations

import json
import secrets
import signal
import string
import tempfile
import time
from collections import Counter
from pathlib import Path

import boto3
import httpx
from rich.console import Console
from rich.table import Table

from bench.leaks.canaries import Canary, Hit, Hunter
from bench.leaks.places import Ground, Place, all_places
from bench.leaks.sampler import Sampler
from bench.leaks.story import KEYS_IN_ENVIRONMENT, Story, environment_of
from bench.patch import Figure
from fleet.paths import state_dir
from fleet.steps import Steps
from sandbox import local_fleet, world
from sandbox.standins import metadata
from sandbox.standins.aws import SECRET_ID

# Looked through after every step: a later run tidies up what an earlier one left.
_OFTEN = "the runner's logs and directories"


def run(console: Console, steps: Steps) -> int:
    """Runs the whole, prints tables and figures, and returns the exit code: 1 where a goal is missed."""
    world.refuse_one_that_is_up("bench")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in the background: the commands would ignore it too, and one of them is to get it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ground = Ground(since=time.time(), containers=())
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = local_fleet.up(steps)
            ground.containers = (found.hosts[0].name,)
            hits, looked = _hunted(found, ground, Path(folder), steps)
            _tell(console, hits)
            bites = _bites(ground, steps)
        finally:
            world.down(steps)
    places = all_places()
    raw = state_dir() / "bench" / "leaks.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    kept = [{"canary": hit.canary, "form": hit.form, "where": hit.where} for hit in hits]
    raw.write_text(json.dumps({"hits": kept, "looked": looked, "bites": bites}, indent=1))
    _show(console, places, looked, bites)
    share = sum(bites.values()) / len(bites)
    figures = [
        Figure("leak_hits", len(hits), "hits", "=0", not hits),
        Figure("leak_planted_found", round(share, 3), "share", "=1", share == 1),
        Figure("leak_places", len(places), "places", ">=1", bool(places)),
    ]
    for figure in figures:
        print(figure.line())
    console.print(f"measurements: {raw}")
    return int(not all(figure.met for figure in figures))


def _hunted(found: world.World, ground: Ground, folder: Path, steps: Steps) -> tuple[list[Hit], dict[str, int]]:
    """The hits, and how many things were looked at in each place at the end."""
    story, canaries = _planted(found, ground, folder)
    hunter = Hunter(canaries)
    places = all_places()
    hits: list[Hit] = []

    def is_planted(kind: str, data: bytes) -> bool:
        typed = kind == "arguments" and data.rstrip(b"\0") in story.typed
        return typed or (kind == "environment" and f"{KEYS_IN_ENVIRONMENT}=1".encode() in data)

    with Sampler(hunter, is_planted) as sampler:
        for name, step in story.steps():
            with steps.step(name):
                step()
                for place in places:
                    if place.name == _OFTEN:
                        hits += place.look(hunter, ground)[0]
    looked = {}
    for place in places:
        with steps.step(f"hunt: {place.name}"):
            here, looked[place.name] = place.look(hunter, ground)
            hits += here
    looked["processes, sampled all through"] = sampler.processes
    return list(dict.fromkeys([*hits, *sampler.hits])), looked


def _planted(found: world.World, ground: Ground, folder: Path) -> tuple[Story, list[Canary]]:
    """The story of the first host with everything planted, and what is hunted for."""
    machines = httpx.get(f"{found.aws_url}/stand-in/machines", trust_env=False).raise_for_status().json()
    instance = next(each["instance_id"] for each in machines if each["address"] == found.hosts[0].address)
    letters = string.ascii_letters + string.digits
    tokens = tuple("hf_" + "".join(secrets.choice(letters) for _ in range(34)) for _ in range(2))
    boto3.client("secretsmanager").put_secret_value(
        SecretId=SECRET_ID, SecretString=json.dumps({"HF_TOKEN": tokens[0]})
    )
    host_key, host_session = metadata.keys(instance)
    # The same forms, of nobody's instance.
    own_key, own_session = metadata.keys(secrets.token_hex(8))
    extra = "x/\"+=&$%'" + secrets.token_urlsafe(24)
    keys = {
        "AWS_ACCESS_KEY_ID": "ASIA" + secrets.token_hex(8).upper(),
        "AWS_SECRET_ACCESS_KEY": own_key,
        "AWS_SESSION_TOKEN": own_session,
    }
    credentials = folder / "credentials"
    credentials.write_text("[default]\n" + "".join(f"{name.lower()} = {value}\n" for name, value in keys.items()))
    credentials.chmod(0o600)
    ground.planted = (credentials,)
    canaries = [
        Canary("token", tokens[0]),
        Canary("rotated token", tokens[1]),
        Canary("secret key of the host's role", host_key),
        Canary("session token of the host's role", host_session),
        Canary("secret key of the controller", own_key),
        Canary("session token of the controller", own_session),
        Canary("extra variable", extra),
    ]
    environment = environment_of(local_fleet.environment(found), credentials)
    story = Story(ground, environment, keys, instance, found.hosts[0].name, (tokens[0], tokens[1]), extra)
    return story, canaries


def _bites(ground: Ground, steps: Steps) -> dict[str, bool]:
    """Whether a secret that is put in each place is found there, and not before."""
    found = {}
    for place in all_places():
        with steps.step(f"planted: {place.name}"):
            planted = Canary("planted", "hf_" + secrets.token_hex(17))
            hunter = Hunter([planted])
            before = place.look(hunter, ground)[0]
            with place.plant(planted.value, ground):
                found[place.name] = not before and bool(place.look(hunter, ground)[0])
    return found


def _show(console: Console, places: list[Place], looked: dict[str, int], bites: dict[str, bool]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "looked at", "finds what is planted"):
        table.add_column(name, overflow="fold")
    for place in places:
        table.add_row(place.name, f"{looked[place.name]:,}", "yes" if bites[place.name] else "NO")
    console.print(table)
    console.print(f"processes sampled all through: {looked['processes, sampled all through']:,}")


def _tell(console: Console, hits: list[Hit]) -> None:
    for (canary, where), count in Counter((hit.canary, hit.where) for hit in hits).items():
        console.print(f"LEAK {canary} in {where} ({count} forms)", markup=False, soft_wrap=True)
