#!/usr/bin/env python3
"""The Kubernetes manifests: valid against the API's schemas, whole, in agreement with each other and with the programs' flags."""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))
import harness  # noqa: E402
from harness import check  # noqa: E402

HERE = Path(__file__).resolve().parent
MANIFESTS = HERE.parent.parent / "deploy" / "kubernetes"
VERSIONS = ["1.28", "1.37"]


def enter_environment():
    """Starts this test again with the Python that has the schemas. It is kept in the user's cache under the digest of the pins."""
    requirements = HERE / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quern"
    environment = cache / f"kubernetes-{digest}"
    if not environment.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            venv.create(made, with_pip=True)
            install = subprocess.run([f"{made}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "-r",
                                      requirements], capture_output=True, text=True)
            if install.returncode != 0:
                harness.skip(f"kubernetes-validate cannot be installed: {install.stderr.strip()[-500:]}")
            try:
                os.rename(made, environment)
            except OSError:  # another run was faster
                check(environment.exists(), f"{environment} cannot be made")
            else:
                Path(made).mkdir()  # for the context's end
    os.execv(environment / "bin/python", [environment / "bin/python", *sys.argv, "--in-environment"])


def load_all():
    """(file, document) of every manifest; each must be named by the kustomization beside it."""
    import yaml
    found = []
    for kustomization in sorted(MANIFESTS.glob("*/kustomization.yaml")):
        directory = kustomization.parent
        content = yaml.safe_load(kustomization.read_text())
        for entry in content["resources"] + content.get("components", []):
            check((directory / entry).exists(), f"{kustomization} names {entry}, which is not there")
        named = {entry for entry in content["resources"] if entry.endswith(".yaml")}
        there = {path.name for path in directory.glob("*.yaml")} - {"kustomization.yaml"}
        check(named == there, f"{kustomization} does not name {sorted(there - named)}")
        for name in sorted(named):
            found += [(directory / name, document) for document in yaml.safe_load_all((directory / name).read_text())]
    return found


def rendered(example):
    """What kustomize makes of an overlay, or nothing where it is not installed."""
    import yaml
    for command in [["kustomize", "build"], ["kubectl", "kustomize"]]:
        if shutil.which(command[0]):
            run = subprocess.run([*command, example], capture_output=True, text=True)
            check(run.returncode == 0, f"{' '.join(command)} {example}: {run.stderr}")
            return list(yaml.safe_load_all(run.stdout))
    print("neither kustomize nor kubectl is installed: the overlay is not rendered")
    return []


def validate(document, what):
    import kubernetes_validate
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise harness.Failure(f"{what} is no {document['kind']} of Kubernetes {version}: {error.message}") from None


def mebibytes(text):
    number, unit = re.fullmatch(r"(\d+)(MiB|Mi|Gi)", text).groups()
    return int(number) * (1024 if unit == "Gi" else 1)


def check_flags(container, programs):
    program = {"quernd": programs.quernd, "quern-worker": programs.worker}[container["command"][0]]
    known = set(re.findall(r"--[\w-]+", subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout))
    given = {argument.split("=")[0] for argument in container["args"]}
    check(given <= known, f"{program.name} has no {', '.join(sorted(given - known))}")


def check_that_is_there(container, probe, name):
    check(probe in container, f"{name} has no {probe}")
    return container[probe]


def check_pods(name, workload, manifests, programs):
    pod = workload["spec"]["template"]
    labels, spec = pod["metadata"]["labels"], pod["spec"]
    selector = workload["spec"]["selector"]["matchLabels"]
    check(selector.items() <= labels.items(), f"{name} selects {selector}, its pods have {labels}")
    container = spec["containers"][0]
    check_flags(container, programs)
    for probe in ["livenessProbe", "readinessProbe"]:
        page = check_that_is_there(container, probe, name).get("httpGet")
        # The metrics' address serves these two, and nothing but figures besides.
        check(page is None or (page["port"] == "metrics" and page["path"] in ["/healthz", "/readyz"]), f"{name}: {probe} asks for {page}")
    volumes = {volume["name"]: volume for volume in spec["volumes"] + [
        {"name": claim["metadata"]["name"]} for claim in workload["spec"].get("volumeClaimTemplates", [])]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    check(set(mounts.values()) == volumes.keys(), f"{name} mounts {sorted(mounts.values())} of the volumes {sorted(volumes)}")
    readme = (MANIFESTS / "README.md").read_text()
    for volume in volumes.values():
        if "secret" in volume:
            check(f"`{volume['secret']['secretName']}`" in readme, f"the README tells nothing of the secret {volume['secret']['secretName']}")
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            check(("PersistentVolumeClaim", claim) in manifests, f"{name} uses the claim {claim}, which is not there")
    for argument in container["args"] + [f"={entry.get('value', '')}" for entry in container.get("env", [])]:
        path = argument.partition("=")[2].removeprefix("unix:")
        if path.startswith("/"):
            check(any(f"{path}/".startswith(f"{mount}/") for mount in mounts), f"{name}: {argument} lies in none of its volumes")
    limit = mebibytes(container["resources"]["limits"]["memory"])
    check(limit >= mebibytes(container["resources"]["requests"]["memory"]), f"{name} asks for more memory than its limit")
    pool = next((argument.partition("=")[2] for argument in container["args"] if argument.startswith("--memory=")), None)
    check(pool is None or mebibytes(pool) + 256 == limit, f"{name}: the pool {pool} and 256 MiB are not the limit {limit} MiB")
    return labels


def test(arguments):
    if not arguments.in_environment:
        enter_environment()
    programs = harness.Programs(arguments.bin)
    documents = load_all()
    manifests = {(document["kind"], document["metadata"]["name"]): document for _, document in documents}
    check(len(manifests) == len(documents), "two manifests have one name")
    for file, document in documents:
        validate(document, file.relative_to(MANIFESTS))
        if document["kind"] != "Namespace":
            check(document["metadata"]["namespace"] == "quern", f"{file} is in another namespace")
    for document in rendered(MANIFESTS / "example"):
        validate(document, f"{document['metadata']['name']} of the example")

    broken = {**manifests["Deployment", "quern-worker"], "spec": {"replica": 1}}
    try:
        validate(broken, "a broken Deployment")
        raise AssertionError("the schemas accept a broken Deployment")
    except harness.Failure:
        pass

    pods = [check_pods(name, document, manifests, programs) for (kind, name), document in manifests.items() if kind in ("Deployment", "StatefulSet")]
    check(len(pods) == 3, f"{len(pods)} workloads, wanted coordinator, workers and GPU workers")
    selectors = [(name, document["spec"]["selector"].get("matchLabels", {})) for (kind, name), document in manifests.items()
                 if kind == "PodDisruptionBudget"]
    selectors += [(name, document["spec"]["selector"]) for (kind, name), document in manifests.items() if kind == "Service"]
    selectors += [(name, document["spec"]["podSelector"].get("matchLabels", {})) for (kind, name), document in manifests.items()
                  if kind == "NetworkPolicy"]
    for name, selector in selectors:
        check(any(selector.items() <= labels.items() for labels in pods), f"{name} selects {selector}, which no pod has")
    service = manifests["Service", "quern"]["spec"]["ports"][0]
    server = next(a for a in manifests["Deployment", "quern-worker"]["spec"]["template"]["spec"]["containers"][0]["args"] if a.startswith("--server="))
    check(server == f"--server=quern:{service['port']}", f"workers connect with {server}, the service has port {service['port']}")
    print(f"kubernetes_test: {len(documents)} manifests against {' and '.join(VERSIONS)}: ok")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or one with the three programs")
    parser.add_argument("--in-environment", action="store_true", help=argparse.SUPPRESS)
    sys.exit(harness.main(lambda: test(parser.parse_args())))
