"""shardline certs: a CA and a certificate for each task, for trials and for networks without a CA."""

from __future__ import annotations

from pathlib import Path

import click

from shardline.cluster import parse_address, read_spec
from shardline.errors import UsageError
from shardline.roles import ROLES


@click.command(short_help="Create a test CA and a certificate for each task.")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="A machine's name or IP address; may be repeated.")
@click.option(
    "--cluster", metavar="FILE", help="cluster.json; make a certificate for each of its tasks, named after the task."
)
@click.option(
    "--role", type=click.Choice(ROLES.declared), help="Restrict the certificates of --host to what this role may do."
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="Validity of the certificates, in days.",
)
@click.option("--renew", is_flag=True, help="Replace all certificates of OUT but the CA's by new ones with new keys.")
def certs(out: Path, hosts: tuple[str, ...], cluster: str | None, role: str | None, days: int, renew: bool) -> int:
    """Create a CA and certificates in the folder OUT, for TLS on both sides of every connection.

    Creates one certificate for each --host, in OUT/NAME.pem and OUT/NAME.key, or for each task of --cluster, in
    OUT/ps-0.pem and so on; without either, one for this machine. Certificates made with --cluster or --role are
    restricted to what that role may do. An existing CA in OUT is used to sign further certificates. Existing files are
    never overwritten, except by --renew; tasks that run use the new ones without a restart.
    """
    if renew:
        if hosts or cluster or role:
            raise UsageError(
                "--renew is for all certificates of OUT, as they are; leave out --host, --cluster and --role"
            )
        from shardline.certs import renew_certificates

        renewed = renew_certificates(out, days=days)
        for cert, key in renewed.pairs.values():
            print(f"{cert}, {key}: renewed, valid until {renewed.until:%Y-%m-%d}")
        return 0
    tasks = _tasks(cluster)
    wanted = {**tasks, **{host.replace(":", "-"): host for host in hosts}} or {"localhost": "localhost"}
    roles = {name: name.partition("-")[0] if name in tasks else role or "" for name in wanted}
    # Importing it takes a moment.
    from shardline.certs import make_certificates

    made = make_certificates(out, wanted, days=days, roles=roles)
    key = made.ca.with_suffix(".key")
    print(f"{made.ca}, {key}: the CA{'' if made.new_ca else ', as it was'}; no task needs its key; keep it private")
    for name, pair in made.pairs.items():
        print(f"{pair[0]}, {pair[1]}: for {wanted[name]}" + (f", as {roles[name]}" if roles[name] else ""))
    cert, private = next(iter(made.pairs.values()))
    print(f"valid until {made.until:%Y-%m-%d}; give each task its own two files, and every task the CA's certificate:")
    print(f"    --tls-ca {made.ca} --tls-cert {cert} --tls-key {private}")
    return 0


def _tasks(cluster: str | None) -> dict[str, str]:
    """Hosts of a cluster's tasks, by the name of their files."""
    if cluster is None:
        return {}
    spec = read_spec(cluster)
    found = {}
    for task in spec.task_names():
        host, _ = parse_address(spec.address(task))
        if host == "*":
            raise UsageError(f"{task} has no address in the cluster spec; list the machines with --host instead")
        found[task.replace("/", "-")] = host
    return found
