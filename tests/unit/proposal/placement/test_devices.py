"""Device assignment: every replica that the fit rules admit gets devices, and the fitting ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from remit.law.fit import Requirements
from remit.law.requirements import compile_requirements
from remit.model.kinds import Device, DeviceRequest
from remit.proposal.placement.devices import assign_devices, fits_devices
from tests.properties.authority_world import workload
from tests.unit.law.fit_oracle import devices_available

A10, H100 = (Device(name=f"{model.lower()}-{i}", kind="gpu", model=model) for model, i in (("A10", 0), ("H100", 1)))


def ask(*devices: DeviceRequest) -> Requirements:
    return compile_requirements("t", "w", {}, workload("w", devices=devices).spec, ())


def test_share_goes_to_device_with_least_left_over() -> None:
    part = ask(DeviceRequest(kind="gpu", share="300m"))
    assert assign_devices(part, (A10, H100), {"a10-0": 200, "h100-1": 600}) == {"h100-1": 300}
    assert assign_devices(part, (A10, H100), {"a10-0": 800, "h100-1": 800}) is None


def test_request_for_any_model_leaves_rare_model_to_request_that_needs_it() -> None:
    both = ask(DeviceRequest(kind="gpu", count=1), DeviceRequest(kind="gpu", count=1, models=("A10",)))
    assert assign_devices(both, (A10, H100), {}) == {"a10-0": 1000, "h100-1": 1000}


def test_partly_used_device_is_not_assigned_whole() -> None:
    two_devices = ask(DeviceRequest(kind="gpu", count=2))
    assert assign_devices(two_devices, (A10, H100), {"a10-0": 100}) is None
    assert assign_devices(two_devices, (A10, H100), {"a10-0": 0}) == {"a10-0": 1000, "h100-1": 1000}


KINDS = st.sampled_from(["gpu", "fpga"])
MODELS = st.sampled_from([(), ("A10",), ("A10", "B")])
REQUESTS = st.lists(st.builds(DeviceRequest, kind=KINDS, count=st.integers(1, 2), models=MODELS), max_size=3)
DEVICES = st.lists(st.tuples(KINDS, st.sampled_from(["A10", "B", "C"]), st.sampled_from([0, 0, 300, 1000])), max_size=5)


@settings(max_examples=200)
@given(REQUESTS, DEVICES)
def test_whole_devices_are_assigned_exactly_when_fit_rules_allow(
    requested: list[DeviceRequest], available: list[tuple[str, str, int]]
) -> None:
    named = [Device(name=f"d{i}", kind=kind, model=model) for i, (kind, model, _) in enumerate(available)]
    taken = {f"d{i}": used for i, (_, _, used) in enumerate(available) if used}
    one = ask(*requested)
    found = assign_devices(one, named, taken)
    assert (found is not None) == devices_available(requested, named, taken) == fits_devices(one, named, taken)
    if found is not None:
        assert len(found) == sum(each.count for each in requested)
        assert not any(taken.get(name) for name in found)
