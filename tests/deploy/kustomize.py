"""As much of kustomize as the manifests use: what `kubectl kustomize` makes of a folder, where there is no kubectl.

Resources, components, generated ConfigMaps (the suffix of their name is a fixed one), images, the namespace, and JSON
patches of the operations add and replace.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
SUFFIX = "-made"


def render(folder: Path) -> list[Manifest]:
    """Manifests of a folder with a kustomization.yaml; raises ValueError at what is not understood."""
    found = _accumulate(folder, [])
    made = {one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"}
    return [_suffixed(one, made) for one in found]


def _accumulate(folder: Path, found: list[Manifest]) -> list[Manifest]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "images", "patches"}
    if unknown := set(kustomization) - known:
        raise ValueError(f"{folder}: {sorted(unknown)} is not understood")
    for name in kustomization.get("resources", ()):
        path = folder / name
        found += _accumulate(path, []) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for name in kustomization.get("components", ()):
        found = _accumulate(folder / name, found)
    for generator in kustomization.get("configMapGenerator", ()):
        _generate(folder, generator, found)
    for patch in kustomization.get("patches", ()):
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        targets = [one for one in found if _selects(patch["target"], one)]
        if not targets:
            raise ValueError(f"{folder}: a patch has no target: {patch['target']}")
        for target in targets:
            for operation in yaml.safe_load(text):
                _apply(target, operation)
    for manifest in found:
        if "namespace" in kustomization:
            manifest["metadata"]["namespace"] = kustomization["namespace"]
        for image in kustomization.get("images", ()):
            _name_image(manifest, image)
    return found


def _generate(folder: Path, generator: Manifest, found: list[Manifest]) -> None:
    data = {name: (folder / name).read_text() for name in generator.get("files", ())}
    lines = [line for name in generator.get("envs", ()) for line in (folder / name).read_text().splitlines()]
    lines += generator.get("literals", ())
    data |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    if generator.get("behavior") == "merge":
        (before,) = (one for one in found if one["metadata"]["name"] == generator["name"])
        before["data"] |= data
    else:
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data})


def _selects(target: Manifest, manifest: Manifest) -> bool:
    labels = dict(part.split("=") for part in target.get("labelSelector", "").split(",") if part)
    metadata = manifest["metadata"]
    return (
        re.fullmatch(target.get("kind", ".*"), manifest["kind"]) is not None
        and re.fullmatch(target.get("name", ".*"), metadata["name"]) is not None
        and labels.items() <= metadata.get("labels", {}).items()
    )


def _apply(manifest: Manifest, operation: Manifest) -> None:
    """RFC 6902, "add" and "replace"."""
    *parents, last = (
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].removeprefix("/").split("/")
    )
    at: Any = manifest
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    value = copy.deepcopy(operation["value"])
    if operation["op"] == "add" and isinstance(at, list) and last == "-":
        at.append(value)
    elif (operation["op"] == "add" and isinstance(at, dict)) or (
        operation["op"] == "replace" and isinstance(at, dict) and last in at
    ):
        at[last] = value
    else:
        raise ValueError(f"{manifest['metadata']['name']}: can't {operation['op']} {operation['path']}")


def _containers(manifest: Manifest) -> list[Manifest]:
    found: list[Manifest] = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    return found


def _name_image(manifest: Manifest, image: Manifest) -> None:
    for container in _containers(manifest):
        if container["image"] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"


def _suffixed(manifest: Manifest, made: set[str]) -> Manifest:
    """Generated ConfigMaps and what refers to them, under the names they get."""
    if manifest["kind"] == "ConfigMap":
        manifest["metadata"]["name"] += SUFFIX
    references = [source["configMapRef"] for one in _containers(manifest) for source in one.get("envFrom", ())]
    volumes = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", ())
    references += [volume["configMap"] for volume in volumes if "configMap" in volume]
    for reference in references:
        if reference["name"] in made:
            reference["name"] += SUFFIX
    return manifest
