"""shardline init: a folder with a job or script that trains, from the examples, and a compose file for it."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from shardline.cli.options import write_file
from shardline.errors import UsageError

PACKAGED = Path(__file__).with_name("examples")
EXAMPLES = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "examples"
"""A wheel has them beside this file, a checkout in its root."""
CLUSTER = "--ps 2 --workers 2"


@dataclass(frozen=True)
class Template:
    """A kind of project: a file of the examples, and how it is trained."""

    source: str
    """The file below EXAMPLES."""
    needs: tuple[str, ...] = ()
    """Modules that it imports and Shardline doesn't."""
    flags: str = f"{CLUSTER} --evaluators 1"
    script: bool = False
    """It is a training script, not a job file."""

    @property
    def name(self) -> str:
        return Path(self.source).name

    @property
    def command(self) -> str:
        return f"shardline train {'--script ' if self.script else ''}{self.name} {self.flags}"


TEMPLATES = {
    "digits": Template("digits/job.py", ("sklearn",)),
    "charlm": Template("charlm/job.py"),
    "pipeline": Template("pipeline/job.py", ("sklearn",), flags="--ps 2 --workers 4 --evaluators 1"),
    "script": Template("digits/train.py", ("sklearn",), flags=CLUSTER, script=True),
    "hf": Template("transformers/train.py", ("sklearn", "transformers"), flags=CLUSTER, script=True),
}
PACKAGES = {"sklearn": "scikit-learn", "transformers": "transformers[torch]"}
"""Names of packages by module."""


@click.command("init", short_help="Write a project that trains.")
@click.argument("template", type=click.Choice(list(TEMPLATES)), default="digits")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
def init(template: str, folder: Path | None) -> None:
    """Write a job (digits, charlm, pipeline) or a script (script, hf: with transformers), and a compose file, into DIR.

    The default of DIR is the template's name. A file that exists is never overwritten.
    """
    chosen, folder = TEMPLATES[template], folder or Path(template)
    texts = {
        chosen.name: (EXAMPLES / chosen.source).read_text().replace(f"examples/{Path(chosen.source).parent}/", ""),
        "compose.yaml": compose_file(chosen),
    }
    if there := [str(folder / name) for name in texts if (folder / name).exists()]:
        raise UsageError(f"{' and '.join(there)} already exist{'s' * (len(there) == 1)}; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} can't be made: {error.strerror}; choose another folder") from None
    for name, text in texts.items():
        write_file(folder / name, text)
        click.echo(f"wrote {folder / name}")
    if missing := [PACKAGES[module] for module in chosen.needs if importlib.util.find_spec(module) is None]:
        click.echo(f"it needs more: pip install {shlex.join(missing)}")
    click.echo(f"train: {'' if folder == Path() else f'cd {folder} && '}{chosen.command}")


COMPOSE = """\
# <file> on a cluster of containers on this machine: docker compose up --build
# Before, copy the wheel of Shardline for this machine's processor into this folder. `docker compose cp
# chief:/out/summary.json .` gets the summary; `docker compose down -v` removes all of it.
x-task: &task
  image: shardline-<name>
  init: true
  # A task that ends with 0 has done its part. All others start again, and the job goes on from its newest checkpoint.
  restart: on-failure:5
  stop_grace_period: 60s
  volumes: [".:/job:ro"]

x-environment: &environment
  SHARDLINE_CLUSTER: '{"chief": ["chief:2222"], "ps": 2, "worker": <workers><evaluators>}'
  SHARDLINE_ADDRESS: ":2222"
  SHARDLINE_BIND: 0.0.0.0
  # No TLS: only these containers are in the network between them.
  SHARDLINE_INSECURE_BIND: "true"
  SHARDLINE_EXIT_WITH_JOB: "true"
<job>
services:
  chief:
    <<: *task
    build:
      context: .
      # torch from PyTorch's index of CPU builds: the default one is of CUDA, and ten times as large.
      dockerfile_inline: |
        FROM python:3.11-slim-bookworm
        RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
        COPY shardline-*.whl /tmp/
        RUN pip install --no-cache-dir /tmp/shardline-*.whl <package>
        WORKDIR /tmp
        ENTRYPOINT ["shardline"]
    command: [chief]
    environment:
      <<: *environment
      SHARDLINE_ADDRESS: chief:2222
      SHARDLINE_OUT: /out
      SHARDLINE_RESUME: "true"
    volumes: [".:/job:ro", "out:/out"]
    healthcheck: { test: [CMD, shardline, health], interval: 5s, timeout: 10s, retries: 3, start_period: 600s }

  ps:
    <<: *task
    command: [ps]
    environment: { <<: *environment, SHARDLINE_TASK: ps/any }
    depends_on: { chief: { condition: service_healthy } }
    deploy: { replicas: 2 }

  worker:
    <<: *task
    <trains>
    environment: { <<: *environment, SHARDLINE_TASK: worker/any }
    depends_on: { chief: { condition: service_healthy } }
    deploy: { replicas: <workers> }
<evaluator>
volumes:
  out:
"""
EVALUATOR = """
  evaluator:
    <<: *task
    command: [evaluator]
    environment: { <<: *environment, SHARDLINE_TASK: evaluator/any }
    depends_on: { chief: { condition: service_healthy } }
"""


def compose_file(template: Template) -> str:
    """A chief, two servers, workers and, for a job, an evaluator, in containers of one machine."""
    file = template.name
    fields = {
        "file": file,
        "name": Path(template.source).parent.name,
        "package": shlex.join(PACKAGES[module] for module in template.needs),
        "workers": template.flags.split("--workers ")[1].split()[0],
        "job": "" if template.script else f"  SHARDLINE_JOB: /job/{file}\n",
        "trains": f"entrypoint: [python, /job/{file}]" if template.script else "command: [worker]",
        "evaluators": "" if template.script else ', "evaluator": 1',
        "evaluator": "" if template.script else EVALUATOR,
    }
    text = COMPOSE
    for field, value in fields.items():
        text = text.replace(f"<{field}>", value)
    return text
