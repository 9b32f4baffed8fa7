import pytest

from sgc_backend.executables import TRIES, Executables


class Driver:
    """Counts what lives, and says what each launch does."""

    def __init__(self):
        self.does, self.calls, self.made, self.fails, self.refuses = {}, [], 0, 0, set()

    def signature(self, graph):
        return {1: b"a", 2: b"a", 3: b"b", 4: None, 5: None}.get(graph, b"%d" % graph)

    def instantiate(self, graph):
        self.made += 1
        self.does[self.made] = graph
        return self.made

    def update(self, executable, graph):
        if graph in self.refuses:
            return False
        self.calls.append(("update", graph))
        self.does[executable] = graph
        return True

    def launch(self, executable, stream):
        self.calls.append(("launch", self.does[executable], stream))
        return self.fails

    def destroy(self, executable):
        del self.does[executable]


class Graph:
    """Torch's graph, by the driver's address of it."""

    def __init__(self, raw):
        self.raw, self.replays, self.resets = raw, 0, 0

    def raw_cuda_graph(self):
        return self.raw

    def replay(self):
        self.replays += 1

    def reset(self):
        self.resets += 1


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def executables(driver):
    return Executables(driver, lambda: 7)


def test_graphs_that_are_alike_run_through_one_executable(driver, executables):
    one, two = (executables.join(Graph(raw), "piece 0") for raw in (1, 2))
    assert one.executable is two.executable
    assert (executables.graphs, executables.alive) == (2, 1)
    driver.calls.clear()
    two.replay()
    one.replay()
    one.replay()
    two.replay()
    launched = [call[1] for call in driver.calls if call[0] == "launch"]
    assert launched == [2, 1, 1, 2]
    assert driver.calls.count(("update", 1)) == driver.calls.count(("update", 2)) == 1  # none where it holds it already
    assert {call[2] for call in driver.calls if call[0] == "launch"} == {7}


@pytest.mark.parametrize(("raw", "family"), [(3, "piece 0"), (2, "piece 1"), (4, "piece 0")])
def test_what_is_not_alike_or_of_another_family_has_its_own(raw, family, driver, executables):
    one = executables.join(Graph(1), "piece 0")
    two = executables.join(Graph(raw), family)
    assert one.executable is not two.executable
    one.replay()
    two.replay()
    assert [call[1] for call in driver.calls] == [1, raw]


def test_graphs_that_say_nothing_of_themselves_share_with_none(executables):
    assert executables.join(Graph(4), "piece 0").executable is not executables.join(Graph(5), "piece 0").executable


def test_a_graph_that_the_driver_refuses_to_take_over_gets_its_own(driver, executables):
    one = executables.join(Graph(1), "piece 0")
    driver.refuses.add(2)
    two = executables.join(Graph(2), "piece 0")
    assert one.executable is not two.executable
    two.replay()
    assert driver.calls[-1][:2] == ("launch", 2)


@pytest.mark.parametrize("when", ["recorded", "replayed"])
def test_an_interrupt_behind_an_update_leaves_no_graph_to_run_in_anothers_place(when, driver, executables):
    one = executables.join(Graph(1), "piece 0")
    update = driver.update

    def interrupted(executable, graph):
        update(executable, graph)
        raise KeyboardInterrupt

    if when == "replayed":
        two = executables.join(Graph(2), "piece 0")
        one.replay()
    driver.update = interrupted
    with pytest.raises(KeyboardInterrupt):
        executables.join(Graph(2), "piece 0") if when == "recorded" else two.replay()
    driver.update = update
    one.replay()
    assert driver.calls[-1][:2] == ("launch", 1)


def test_an_update_refused_at_replay_leaves_it_to_torch(driver, executables):
    graph = Graph(1)
    one, _ = executables.join(graph, "piece 0"), executables.join(Graph(2), "piece 0")
    driver.refuses.add(1)
    driver.calls.clear()
    one.replay()
    assert graph.replays == 1
    assert not driver.calls


def test_a_launch_that_fails_is_left_to_torch_which_says_why(driver, executables):
    graph = Graph(1)
    shared = executables.join(graph, "piece 0")
    driver.fails = 201
    shared.replay()
    assert graph.replays == 1


def test_a_thread_on_another_device_is_left_to_torch(driver):
    graph = Graph(1)
    Executables(driver, lambda: None).join(graph, "piece 0").replay()
    assert graph.replays == 1
    assert not driver.calls


def test_the_executable_lives_as_long_as_its_last_user(driver, executables):
    one, two = executables.join(Graph(1), "piece 0"), executables.join(Graph(2), "piece 0")
    one.reset()
    one.reset()
    assert one.graph.resets == 2
    assert driver.does
    two.replay()
    assert driver.calls[-1][:2] == ("launch", 2)
    assert (executables.graphs, executables.alive) == (1, 1)
    two.reset()
    assert not driver.does
    assert (executables.graphs, executables.alive) == (0, 0)
    again = executables.join(Graph(2), "piece 0")
    assert again.executable is not None
    assert driver.does == {driver.made: 2}


def test_the_address_of_a_dead_graph_is_not_taken_for_what_an_executable_holds(driver, executables):
    first, second = executables.join(Graph(1), "piece 0"), executables.join(Graph(2), "piece 0")
    second.reset()  # it is what the executable holds
    third = executables.join(Graph(2), "piece 0")  # at the same address, and another graph
    first.replay()
    driver.calls.clear()
    third.replay()
    assert driver.calls == [("update", 2), ("launch", 2, 7)]


def test_a_family_whose_first_graphs_are_all_unlike_is_left_to_torch(executables):
    joined = []
    for raw in range(10, 10 + TRIES):
        assert executables.worth("piece 0")
        joined.append(executables.join(Graph(raw), "piece 0"))
    assert not executables.worth("piece 0")
    assert executables.worth("piece 1")
    for shared in joined:
        shared.reset()
    assert executables.worth("piece 0")


def test_a_family_that_shares_is_looked_at_for_good(executables):
    for raw in (1, 2, *range(10, 10 + 2 * TRIES)):
        executables.join(Graph(raw), "piece 0")
        assert executables.worth("piece 0")
