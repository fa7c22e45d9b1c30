"""Does everybody whom the law lets in find devices of his own, and the fitting ones?"""

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


def test_a_share_goes_where_it_leaves_the_least_over() -> None:
    part = ask(DeviceRequest(kind="gpu", share="300m"))
    assert assign_devices(part, (A10, H100), {"a10-0": 200, "h100-1": 600}) == {"h100-1": 300}
    assert assign_devices(part, (A10, H100), {"a10-0": 800, "h100-1": 800}) is None


def test_who_takes_any_model_leaves_the_rare_one_to_who_needs_it() -> None:
    both = ask(DeviceRequest(kind="gpu", count=1), DeviceRequest(kind="gpu", count=1, models=("A10",)))
    assert assign_devices(both, (A10, H100), {}) == {"a10-0": 1000, "h100-1": 1000}


def test_a_device_of_which_a_part_is_taken_is_nobodys_whole_one() -> None:
    whole = ask(DeviceRequest(kind="gpu", count=2))
    assert assign_devices(whole, (A10, H100), {"a10-0": 100}) is None
    assert assign_devices(whole, (A10, H100), {"a10-0": 0}) == {"a10-0": 1000, "h100-1": 1000}


KINDS = st.sampled_from(["gpu", "fpga"])
MODELS = st.sampled_from([(), ("A10",), ("A10", "B")])
WANTED = st.lists(st.builds(DeviceRequest, kind=KINDS, count=st.integers(1, 2), models=MODELS), max_size=3)
THERE = st.lists(st.tuples(KINDS, st.sampled_from(["A10", "B", "C"]), st.sampled_from([0, 0, 300, 1000])), max_size=5)


@settings(max_examples=200)
@given(WANTED, THERE)
def test_whole_devices_are_found_if_and_only_if_there_is_a_way(
    wanted: list[DeviceRequest], there: list[tuple[str, str, int]]
) -> None:
    named = [Device(name=f"d{i}", kind=kind, model=model) for i, (kind, model, _) in enumerate(there)]
    taken = {f"d{i}": used for i, (_, _, used) in enumerate(there) if used}
    one = ask(*wanted)
    found = assign_devices(one, named, taken)
    assert (found is not None) == devices_available(wanted, named, taken) == fits_devices(one, named, taken)
    if found is not None:
        assert len(found) == sum(each.count for each in wanted)
        assert not any(taken.get(name) for name in found)
