import gc

import pytest
import torch

from sgc_backend import emulated
from sgc_backend.devices import device_of
from sgc_backend.static_inputs import StaticInputs


@pytest.fixture
def statics():
    return StaticInputs(device_of(emulated))


def bound(statics, arg):
    return statics.known(0, arg) or statics.bound(0, arg, "w", whole=False)


def test_a_tensor_that_stays_is_bound_once(statics):
    weight = torch.ones(4, 3)
    first = bound(statics, weight)
    assert bound(statics, weight) is first
    assert first.place == (0, weight.data_ptr(), 48, "w")
    assert torch.equal(first.unowned, weight)


def test_the_callers_memory_is_not_kept_alive(statics):
    weight = torch.ones(4, 3)
    found = bound(statics, weight)
    del weight
    gc.collect()
    assert found.memory() is None
    assert found.storage.expired()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: torch.ones(4, 3), id="another tensor"),
        pytest.param(lambda w: w.clone(), id="a copy"),
        pytest.param(lambda w: w.detach()[1:], id="a part of the same memory"),
        pytest.param(lambda w: w._neg_view(), id="its negative over the same memory"),
        pytest.param(lambda w: w.set_(torch.ones(4, 3)), id="other memory"),
        pytest.param(lambda w: w.t_(), id="another layout"),
        pytest.param(lambda w: w.as_strided_((2, 3), (3, 1)), id="another size"),
    ],
)
def test_what_changed_is_bound_anew(change, statics):
    weight = torch.ones(4, 3)
    first = bound(statics, weight)
    now = change(weight)
    again = bound(statics, now)
    assert again is not first
    assert again.memory() is now.untyped_storage()
    assert again.place[1] == now.data_ptr()
    assert again.unowned.stride() == now.stride()
    assert again.unowned.size() == now.size()


def test_another_object_over_the_same_elements_is_what_was_bound(statics):
    weight = torch.ones(4, 3)
    assert bound(statics, weight.detach()) is bound(statics, weight)


def test_a_bound_tensor_may_change_places_with_another(statics):
    weight, other = torch.ones(4, 3), torch.zeros(4, 3)
    first = bound(statics, weight)
    torch.utils.swap_tensors(weight, other)
    assert bound(statics, weight).place[1] == weight.data_ptr() != first.place[1]


def test_what_a_piece_reshaped_in_place_is_bound_anew(statics):
    weight = torch.ones(4, 3)
    bound(statics, weight).unowned.t_()
    assert bound(statics, weight).unowned.size() == weight.size()


def test_recordings_of_the_same_inputs_share_their_storages_also_while_they_are_cleared(statics):
    class Clearing(list):
        def __iter__(self):
            statics.clear()  # as a release in another thread
            return super().__iter__()

    storages = [object(), object()]
    first = statics.as_one(storages)
    assert statics.as_one(storages) is first
    assert statics.as_one(Clearing(storages)) == first == tuple(storages)
