"""Writes what an image consists of, as a CycloneDX 1.6 document: sbom.py VERSION > sbom.cdx.json.

It lists the Python packages of the interpreter that runs it, that interpreter, and the Debian or
Ubuntu packages of the machine. It uses the standard library alone, and gives the same document
for the same packages.
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterator
from urllib.parse import quote

PROJECT = "logsteer"


def describe_licence(metadata: importlib.metadata.PackageMetadata) -> list[dict[str, object]]:
    """The licence as a package declares it: an expression, a short name, or its classifiers."""
    if expressions := metadata.get_all("License-Expression"):
        return [{"expression": expressions[0]}]
    name, *_ = metadata.get_all("License") or [""]
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    # Some packages put the whole text of their licence into the field for its name.
    names = [name] if 0 < len(name) < 80 and "\n" not in name else classifiers
    return [{"license": {"name": each}} for each in names]


def list_python_packages() -> Iterator[dict[str, object]]:
    """The installed distributions, each once, without the project itself."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        if name == PROJECT:
            continue
        purl = f"pkg:pypi/{name}@{quote(distribution.version)}"
        component = {"type": "library", "name": name, "version": distribution.version, "purl": purl}
        licences = describe_licence(distribution.metadata)
        yield component | {"bom-ref": purl} | ({"licenses": licences} if licences else {})


def list_system_packages() -> Iterator[dict[str, object]]:
    """The packages that dpkg says are installed."""
    release = platform.freedesktop_os_release()
    shown = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for line in shown.splitlines():
        name, version, architecture = line.split()
        purl = (
            f"pkg:deb/{release['ID']}/{name}@{quote(version, safe='')}"
            f"?arch={architecture}&distro={release['ID']}-{release['VERSION_ID']}"
        )
        yield {
            "type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl,
        }  # fmt: skip


def write_document(version: str) -> dict[str, object]:
    """The document, its components in order and without repetition."""
    python = platform.python_version()
    purl = f"pkg:generic/cpython@{python}"
    interpreter: dict[str, object] = {
        "type": "platform", "name": "cpython", "version": python, "purl": purl, "bom-ref": purl,
    }  # fmt: skip
    found = {
        str(component["purl"]): component
        for component in [interpreter, *list_python_packages(), *list_system_packages()]
    }
    components = [found[purl] for purl in sorted(found)]
    # The same packages have the same serial number, so documents can be compared as files.
    digest = uuid.uuid5(uuid.NAMESPACE_URL, PROJECT + version + " ".join(sorted(found)))
    reference = f"pkg:pypi/{PROJECT}@{version}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{digest}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container", "name": PROJECT, "version": version, "bom-ref": reference,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
    }  # fmt: skip


if __name__ == "__main__":
    json.dump(write_document(sys.argv[1]), sys.stdout, indent=1)
    sys.stdout.write("\n")
