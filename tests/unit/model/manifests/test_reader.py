"""Manifest reader: objects of good manifests, and all problems of contradictory ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from remit.model import kinds, objects, records
from remit.model.manifests.reader import read
from remit.model.resources import Amount, Duration
from tests.unit.model.manifests.manifest_texts import HEAD

EXAMPLES = Path(__file__).parents[4] / "examples"

WORKLOAD = """apiVersion: remit/v1
kind: Workload
metadata: {name: shop, tenant: web}
spec:
  type: %s
  template:
    command: [run]
    ports: [{name: http}]
"""


def problems_of(text: str, *, system: bool = False) -> list[str]:
    return [f"{p.path}: {p.message}; {p.cure}" for p in read(text.encode(), "f.yaml", system=system).problems]


def test_normative_manifests_are_read_completely() -> None:
    workload, node, tenant = read((EXAMPLES / "risk-api.yaml").read_bytes(), "risk-api.yaml").objects
    assert isinstance(workload, kinds.Workload)
    assert isinstance(node, kinds.Node)
    assert isinstance(tenant, kinds.Tenant)
    spec = workload.spec
    assert (spec.type, spec.replicas, spec.priority_class, spec.replace) == ("service", 4, "critical", "eager")
    assert spec.template.command == ("python3", "-m", "http.server", "$(PORT_http)")
    assert spec.template.resources == Amount({"cpu": 500, "memory": 256 << 20})
    assert spec.template.devices == (kinds.DeviceRequest(kind="gpu", count=1, models=("A10",)),)
    assert spec.template.probes.ready == kinds.Probe(http=kinds.HttpProbe(port="http", path="/"), period=Duration(2000))
    assert spec.placement.standby[0].budget == "eu-west-recovery"
    assert spec.rollout.progress_deadline == Duration(300_000)
    assert node.spec.capacity == Amount({"cpu": 32_000, "memory": 128 << 30})
    assert tenant.spec.quota == Amount({"cpu": 200_000, "memory": 512 << 30, "devices/gpu": 8000})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_every_example_is_read_and_round_trips(path: Path) -> None:
    manifests = read(path.read_bytes(), path.name)
    assert manifests.problems == ()
    for obj in manifests.objects:
        assert objects.decode(objects.encode(obj)) == obj


def test_examples_refer_only_to_each_other() -> None:
    """The demo applies them together."""
    examples = [obj for path in sorted(EXAMPLES.glob("*.*")) for obj in read(path.read_bytes(), path.name).objects]
    keys = {objects.key(obj) for obj in examples}
    assert len(keys) == len(examples)
    for obj in examples:
        if isinstance(obj, kinds.Workload):
            named = {f"tenant/{obj.metadata.tenant}", *(f"region/{region}" for region in obj.spec.placement.regions)}
            named |= {f"priorityclass/{obj.spec.priority_class}"} if obj.spec.priority_class else set()
            named |= {f"config/{obj.metadata.tenant}/{mount.name}" for mount in obj.spec.template.configs}
            assert named <= keys
        if isinstance(obj, kinds.Node):
            assert f"region/{obj.spec.region}" in keys


def test_numbers_keep_every_digit() -> None:
    text = HEAD % "Node" + "  region: a\n  zone: b\n  capacity: {memory: 9007199254740993.0, cpu: 1.5, license: 2}\n"
    (node,) = read(text.encode(), "f.yaml").objects
    assert isinstance(node, kinds.Node)
    assert node.spec.capacity == Amount({"memory": 9007199254740993, "cpu": 1500, "license": 2000})


def test_any_problem_means_no_objects() -> None:
    manifests = read((HEAD % "Region" + "  zones: [a]\n---\n" + HEAD % "Region" + "  zone: [a]\n").encode(), "f.yaml")
    assert [str(problem).split(":")[1] for problem in manifests.problems] == ["9", "11"]
    assert manifests.objects == ()


def test_misspelt_field_or_kind_hides_no_nested_problem() -> None:
    text = "apiVersion: remit/v1\nkind: Regoin\nmetadata: {name: a}\nspec: {zone: [B], description: 7}\n"
    assert [problem.split(":")[0] for problem in problems_of(text)] == ["kind", "spec.zone", "spec.zone[0]", "spec.description"]


def test_empty_field_is_reported_at_its_key() -> None:
    (problem,) = read(b"apiVersion: remit/v1\nkind: Region\nmetadata: {name: a}\nspec:\n\n# end\n", "f.yaml").problems
    assert (problem.line, problem.column, problem.message) == (4, 1, "is empty")


def test_problem_is_printed_in_editor_format() -> None:
    (problem,) = read(b"apiVersion: remit/v1\nkind: Region\nmetadata: {name: a}\nspec: {zone: [b]}\n", "dir/a.yaml").problems
    assert str(problem) == "dir/a.yaml:4:8: spec.zone: unknown field; did you mean zones?"


def test_fields_that_remit_sets_are_not_suggested() -> None:
    text = "apiVersion: remit/v1\nkind: Region\nmetadata: {name: a, delete: true}\nstate: {}\nstart: x\n"
    problems = problems_of(text)
    assert [problem.split(": ")[0] for problem in problems] == ["metadata.delete", "state", "start"]
    assert all("unknown field" in problem and "did you mean" not in problem for problem in problems)


def test_messages_contain_no_control_characters() -> None:
    text = WORKLOAD % "service" + '    env: {A: "$(PORT_\\e[2J)"}\n    probes: {ready: {tcp: {port: "\\e[2J"}}}\n'
    problems = read(text.encode(), "f.yaml").problems
    assert len(problems) == 3
    assert all(
        str(problem).isprintable() and problem.message.isprintable() and problem.cure.isprintable() for problem in problems
    )


def test_system_records_are_read_only_with_flag() -> None:
    text = "apiVersion: remit/v1\nkind: Lease\nmetadata: {name: scheduler}\nspec: {holder: me, epoch: 3}\n"
    assert "written by Remit itself" in problems_of(text)[0]
    (lease,) = read(text.encode(), "f.yaml", system=True).objects
    assert isinstance(lease, records.Lease)
    reserved = "apiVersion: remit/v1\nkind: Region\nmetadata: {name: a, labels: {remit/x: y}, deleting: true}\n"
    assert len(problems_of(reserved)) == 2
    assert problems_of(reserved, system=True) == []


@pytest.mark.parametrize(
    ("type_", "addition", "message"),
    [
        ("job", "  rollout: {maxSurge: 1}\n", "spec.rollout: a job's replicas end by themselves"),
        ("daemon", "  gang: {min: 1}\n", "spec.gang: a daemon's"),
        ("service", "  deadline: 1h\n", "spec.deadline: only a job"),
        ("service", "  schedule: '@daily'\n", "spec.schedule: only a job"),
        ("job", "  schedule: 60 * * * *\n", "is not a schedule"),
        ("job", "  schedule: 0 0 * *\n", "is not a schedule"),
        ("job", "  schedule: 9-3 * * * *\n", "is not a schedule"),
        ("job", "  schedule: '*/0 * * * *'\n", "is not a schedule"),
        ("service", "  rollout: {maxSurge: 0}\n", "no replica could ever be replaced"),
        ("service", "  disruption: {minAvailable: 2}\n", "more than the 1 replicas"),
        (
            "job",
            "  gang: {min: 1}\n  placement: {standby: [{region: a, replicas: 1, budget: b}]}\n",
            "a gang cannot have a standby",
        ),
        ("service", "  placement: {regions: [a, a]}\n", 'regions[1]: "a" is listed twice'),
        ("service", "  placement: {tolerations: [{value: x}]}\n", "Equal needs a key"),
        ("service", "  placement: {tolerations: [{key: a b}]}\n", "is not a label key"),
        ("service", "  placement: {expressions: [{key: a, operator: Exists, values: [b]}]}\n", "checks only the key"),
        ("service", "  placement: {expressions: [{key: a, operator: Gt, values: [b]}]}\n", "one whole number"),
        ("service", "  placement: {expressions: [{key: a, operator: Lt}]}\n", "one whole number"),
        ("service", "  priorityClass: Very High\n", "is not a DNS label"),
        ("service", "    env: {URL: 'http://x:$(PORT_grpc)'}\n", "$(PORT_grpc) refers to no port"),
        ("service", "    probes: {ready: {period: 1s}}\n", "has no check"),
        ("service", "    probes: {live: {tcp: {port: htp}}}\n", "did you mean http?"),
        ("service", "    devices: [{kind: gpu, share: 0}]\n", "a share must be greater than 0"),
        ("service", "    devices: [{kind: gpu, share: 2500m}]\n", "write count: 2"),
        ("service", "    configs: [{name: a, path: ../b}]\n", "leaves"),
        ("service", "    secrets: [{name: a}, {name: a}]\n", "is listed twice"),
        ("service", "    resources: {mem: 1Gi}\n", "did you mean memory?"),
        ("service", "    resources: [cpu]\n", "expected amounts by name"),
        ("service", "    stopGrace: -5s\n", "cannot be negative"),
        ("service", "    stopGrace: 99999d\n", "too long"),
        ("service", "    artifacts: [{source: a, path: /etc}]\n", "leaves"),
        ("service", "    probes: 5\n", "expected fields by name, found a whole number"),
        ("service", "    sandbox: true\n", "write bwrap, default or none"),
        ("service", '    user: "a\\0b"\n', "NUL"),
        ("service", '    user: "a\\nb"\n', "template.user: contains a line break"),
        ("service", '    workingDirectory: "/a\\e"\n', "workingDirectory: contains a control character"),
        ("service", "    workingDirectory: ../..\n", "leaves"),
        ("service", '    probes: {live: {http: {port: http, path: "/a\\r\\nHost: b"}}}\n', "http.path: contains a line break"),
        ("service", "    probes: {live: {http: {port: http, path: a}}}\n", 'start it with "/"'),
        ("service", '    configs: [{name: a, path: "/a\\n"}]\n', "path: contains a line break"),
        ("service", '    artifacts: [{source: "http://a\\n", sha256: a}]\n', "source: contains a line break"),
        (
            "service",
            "    probes: {live: {tcp: {port: http}, period: 0s}}\n",
            "live.period: a period of 0 would probe without a pause",
        ),
        ("service", "    probes: {live: {tcp: {port: http}, timeout: 0ms}}\n", "live.timeout: a timeout of 0 leaves no time"),
        ("service", '    probes: {live: {exec: {command: [""]}}}\n', "exec.command[0]: the program is empty"),
        ("service", "  replace: fenced\n  fence: 0s\n", "spec.fence: a replacement waits"),
        ("job", "  fence: 0s\n", "spec.fence: a replacement waits"),
        ("service", "  rollout: {progressDeadline: 0s}\n", "progressDeadline: a rollout with a deadline of 0 would fail"),
        ("service", "  placement: {standby: [{region: a, replicas: 2, budget: b}]}\n", "2 standby replicas for 1 replicas"),
        ("service", "  placement: {nodeSelector: {a..b/x: y}}\n", "is not a label key"),
        ("service", "  placement: {nodeSelector: {-a.b/x: y}}\n", "is not a label key"),
        ("job", "  schedule: 0 0 31 2 *\n", "never matches: none of its months has a day 31"),
        ("job", "  schedule: 0 0 31 4,JUN *\n", "never matches"),
        ("job", "  schedule: '*/99 * * * *'\n", "is not a schedule"),
        ("job", "  schedule: 0 0 * MON *\n", "is not a schedule"),
        ("job", "  schedule: 0 0 * * FRI-MON\n", "is not a schedule"),
        ("service", "    resources: {cpu: 0.1m}\n", "round it"),
        ("service", "    resources: {devices/nic: 1}\n", "write devices: [{kind: nic, count: 1}] beside it"),
        ("service", '    resources: {"@nic": 1}\n', "is not a resource name"),
    ],
)
def test_contradictory_values_are_reported(type_: str, addition: str, message: str) -> None:
    problems = problems_of(WORKLOAD % type_ + addition)
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("type_", "addition"),
    [
        ("job", "  schedule: '*/15 0-6,22 1 1 0,7'\n"),
        ("job", "  schedule: '@hourly'\n"),
        ("job", "  schedule: '@midnight'\n"),
        ("job", "  schedule: '@annually'\n"),
        ("job", "  schedule: 0 9 * jan-Mar MON-FRI\n"),
        ("job", "  schedule: 0 9 * * FRI-SUN,TUE\n"),
        ("job", "  schedule: 0 0 29 2 *\n"),
        ("job", "  schedule: 0 0 31 2 MON\n"),
        ("service", "  fence: 0s\n"),
        ("job", "  replace: eager\n  fence: 0s\n"),
        ("service", "    workingDirectory: /srv/a..b\n"),
        ("service", "  placement: {nodeSelector: {a.b-c.d/x: y}}\n"),
        ("service", "  replicas: 2\n  placement: {standby: [{region: a, replicas: 2, budget: b}]}\n"),
        ("job", "  gang: null\n"),
        ("service", "    env: {A: $$(PORT_none)}\n"),
        ("service", "    devices: [{kind: gpu, share: 0.999}]\n"),
        ("service", "    devices: [{kind: gpu, count: 2}, {kind: fpga, share: 1m}]\n"),
        (
            "service",
            "  placement: {tolerations: [{operator: Exists}], expressions: [{key: a, operator: Gt, values: ['8']}]}\n",
        ),
        ("service", "    probes: {ready: {tcp: {port: 8080}}, live: {exec: {command: [ok]}}}\n"),
        ("daemon", "  disruption: {minAvailable: 2}\n"),
    ],
)
def test_consistent_values_are_accepted(type_: str, addition: str) -> None:
    assert problems_of(WORKLOAD % type_ + addition) == []


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("Region", "  zones: [a, a]\n", "is listed twice"),
        (
            "Node",
            "  region: a\n  zone: b\n  capacity: {cpu: 1}\n  taints:\n" + "    - {key: k, effect: NoExecute}\n" * 2,
            "same key",
        ),
        ("NodePool", "  region: a\n  zones: []\n  capacity: {cpu: 1}\n", "0 items are too few"),
        ("NodePool", "  region: a\n  zones: [b]\n  capacity: {cpu: 1}\n  min: 1\n", "min 1 is more than max 0"),
        ("Tenant", "  quota: {devices: {GPU: 1}}\n", "did you mean gpu?"),
        ("Tenant", "  quota: {gpu: 1}\n", "write devices: {gpu: 1}"),
        ("Tenant", "  quota: {devices: 3}\n", "expected devices by kind"),
        ("Tenant", "  quota: {cpu: [1]}\n", "expected a quantity, found a list"),
        ("Policy", "  rules: []\n", "too few"),
        ("Policy", "  rules: [{allow: {regions: [a, a]}}]\n", "listed twice"),
        ("Policy", "  rules: [{allow: {}}]\n", "the rule has no effect"),
        ("Policy", "  rules: [{allow: {}, priorityClass: ''}]\n", "the rule has no effect"),
        ("Policy", "  rules: [{allow: {regions: []}}]\n", "allow.regions: an empty list would allow all regions"),
        ("Policy", "  rules: [{allow: {regions: [a], zones: []}}]\n", "allow.zones: an empty list would allow all zones"),
        ("Policy", "  rules: [{priorityMax: 5, allow: {pools: []}}]\n", "allow.pools: an empty list"),
        ("Tenant", "  quota: {devices: {nic: 1}, devices/nic: 2}\n", "write devices: {nic: 1}"),
        ("NodePool", "  region: a\n  zones: [b]\n  capacity: {cpu: 1}\n  labels: {remit/x: y}\n", "is reserved"),
        (
            "NodePool",
            "  region: a\n  zones: [b]\n  capacity: {cpu: 1}\n  taints: [{key: remit/x, effect: NoExecute}]\n",
            "is reserved",
        ),
    ],
)
def test_invalid_spec_of_other_kinds_is_reported(kind: str, spec: str, message: str) -> None:
    problems = problems_of(HEAD % kind + spec)
    assert len(problems) == 1, problems
    assert message in problems[0]


def test_conditional_allotment_must_be_standby() -> None:
    text = (
        HEAD.replace("{name: thing}", "{name: thing, tenant: web}") % "Allotment"
        + "  workload: a\n  region: b\n  replicas: 1\n  when: region-lost\n"
    )
    assert "standby: true" in problems_of(text)[0]
    assert problems_of(text + "  standby: true\n") == []


def test_problems_are_sorted_by_position() -> None:
    text = "a: [\n---\n" + HEAD % "Region" + "  zone: [a]\n---\n- x\n---\n" + HEAD % "Tenant" + "  weight: 0\n  quota: {}\n"
    places = [(p.line, p.column, p.path) for p in read(text.encode(), "f.yaml").problems]
    assert places == [(2, 1, "a[0]"), (7, 3, "spec.zone"), (9, 1, ""), (15, 11, "spec.weight")]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("finalizers: [remit/keep]", 'metadata.finalizers[0]: "remit/keep" is reserved'),
        (f"uid: {'u' * 254}", "254 characters are too many; use at most 253"),
        ('uid: "a b"', "is not a uid"),
        (f"owners: [{{kind: {'K' * 254}, name: a}}]", "use at most 253"),
        ('owners: [{kind: "Work\\nload", name: a}]', "is not a kind"),
        (f"owners: [{{kind: Workload, name: a, uid: {'u' * 254}}}]", "use at most 253"),
    ],
)
def test_invalid_metadata_is_reported(metadata: str, message: str) -> None:
    problems = problems_of(f"apiVersion: remit/v1\nkind: Region\nmetadata:\n  name: a\n  {metadata}\n")
    assert len(problems) == 1, problems
    assert message in problems[0]


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        (".env", True),
        (".dockerconfigjson", True),
        ("tls.crt", True),
        ("_", True),
        ("a-", True),
        ("..", False),
        (".", False),
        ("..data", False),
        ("a/b", False),
        ("a b", False),
        ("", False),
        ("k" * 254, False),
    ],
)
@pytest.mark.parametrize("kind", ["Secret", "Config"])
def test_data_keys_must_be_file_names(kind: str, key: str, accepted: bool) -> None:
    text = f'apiVersion: remit/v1\nkind: {kind}\nmetadata: {{name: a, tenant: b}}\nspec: {{data: {{"{key}": x}}}}\n'
    problems = problems_of(text)
    assert (problems == []) == accepted, problems
    assert accepted or "file name" in problems[0] or "is empty" in problems[0] or "use at most 253" in problems[0]


def test_internal_resource_names_are_refused_in_amounts() -> None:
    for name in ("devices/nic", "@nic"):
        with pytest.raises(ValueError, match="not a resource name"):
            Amount.parse({"devices": {"nic": 1}, name: 2})
    amount = Amount({"cpu": 1000, "devices/nic": 2000})
    assert Amount.parse(amount.to_manifest()) == amount


def test_message_is_short_for_any_key_length() -> None:
    for key in ("k" * 900_000, "k " * 450_000):
        manifests = read(f'{{"apiVersion": "remit/v1", "kind": "Region", "{key}": 1}}'.encode(), "f.json")
        assert max(len(str(problem)) for problem in manifests.problems) < 400


def test_json_problems_have_json_cures() -> None:
    for text in ('[["a"]]', '"a"', '{"apiVersion": "remit/v1", "kind": "List", "metadata": "a", "spec": {"a:b": "c"}}'):
        for problem in read(text.encode(), "f.json").problems:
            assert not any(yaml in problem.cure for yaml in ("---", "key: value", "indent", "space after")), problem
    listed = '{"apiVersion": "remit/v1", "kind": "Region", "metadata": {"name": "a"}, "spec": {"zones": "a"}}'
    assert [problem.cure for problem in read(listed.encode(), "f.json").problems] == ['write it as a list: ["a", "b"]']
    assert "---" in read(b"kind: List", "f.yaml").problems[-1].cure


def test_command_needs_program_but_allows_empty_arguments() -> None:
    workload = WORKLOAD % "service"
    for word in ('""', '" "'):
        assert problems_of(workload.replace("[run]", f"[{word}]")) == [
            "spec.template.command[0]: the program is empty; write the program to run as the first word"
        ]
    assert problems_of(workload.replace("[run]", '[run, ""]')) == []


def test_misspelt_resource_is_reported_after_many_others() -> None:
    """A refusal must not depend on the number of suggestions left for the file."""
    many = ", ".join(f"license-{n}: 1" for n in range(60))
    tenants = [f"apiVersion: remit/v1\nkind: Tenant\nmetadata: {{name: t{n}}}\nspec: {{quota: {{{many}}}}}\n" for n in range(3)]
    assert problems_of("---\n".join(tenants)) == []
    last = tenants[-1].replace("license-59", "memroy")
    assert problems_of("---\n".join([*tenants[:2], last])) == ["spec.quota.memroy: unknown resource; did you mean memory?"]
