"""A model that cannot be served is refused when its instance is created, where its files are on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.fleet import Fleet
from tests.support.models import build, build_classifier, build_cross_encoder, build_yes_no_reranker, edit

from teimgr.control.supervision.validation import LAST_PORT, Ports, check_model, is_free
from teimgr.errors import InvalidConfig, InvalidPort, PortAllocationFailed, PortConflict
from teimgr.spec import InstanceSpec, WorkerSpec


def orders(model_id: Path | str, **more: object) -> WorkerSpec:
    return WorkerSpec(name="a", model_id=str(model_id), **more)  # type: ignore[arg-type]


def test_what_can_be_served_passes(tmp_path: Path) -> None:
    check_model(orders(build("bert", tmp_path / "bert"), kind="embedding"))
    check_model(orders(build_yes_no_reranker(tmp_path / "reranker", layout="saved")))


def test_a_kind_that_is_not_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = build_classifier("bert", tmp_path)
    edit(path / "config.json", architectures=["BertForAudioClassification"])

    with pytest.raises(InvalidConfig, match=f"model_id: {path} cannot be served: BertForAudioClassification labels"):
        check_model(orders(path))


def test_orders_that_contradict_the_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match='kind = "reranker" contradicts the model\'s files'):
        check_model(orders(build("bert", tmp_path), kind="reranker"))


def test_code_of_the_models_own_needs_the_instances_word(tmp_path: Path) -> None:
    path = build("bert", tmp_path)
    edit(path / "config.json", auto_map={"AutoModel": "modeling.JinaBertModel"})

    with pytest.raises(InvalidConfig, match="trust_remote_code = true"):
        check_model(orders(path))
    check_model(orders(path, trust_remote_code=True))


def test_a_template_is_not_run_by_the_daemon(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text(
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    )

    check_model(orders(path))


def test_what_is_not_here_is_left_to_the_worker() -> None:
    check_model(orders("nobody/has-this-model"))


@pytest.mark.parametrize("model_id", ["no id at all", "x" * 5000, "a/b/c", "%2Fetc"])
def test_what_is_neither_a_directory_nor_an_id_is_refused(model_id: str) -> None:
    with pytest.raises(InvalidConfig, match="is neither a directory nor a hub id"):
        check_model(orders(model_id))


def test_a_missing_directory_is_refused_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny-splade").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model_id in (str(tmp_path / "models" / "tiny-spalde"), "./models/tiny-spalde", "models/tiny-spalde"):
        with pytest.raises(
            InvalidConfig, match=r"model_id: no such directory: .*did you mean '.*models/tiny-splade'\?"
        ):
            check_model(orders(model_id))
    for model_id in ("/nowhere/at/all", "~nobody-of-this-name/x", "/" + "x" * 5000, "/nul\0"):
        with pytest.raises(InvalidConfig, match="model_id: no such directory: "):
            check_model(orders(model_id))


def test_a_pooling_that_is_not_used_is_no_obstacle_unless_files_are_strict(tmp_path: Path) -> None:
    path = build_cross_encoder("bert", tmp_path)
    for pooling in ("mean", "splade"):  # as TEI, which compose files rely on
        check_model(orders(path, pooling=pooling))
        with pytest.raises(InvalidConfig, match=f"pooling = '{pooling}' is ignored: models of the kind reranker"):
            check_model(orders(path, pooling=pooling, strict_model_files=True))


async def test_the_manager_refuses_it_before_anything_is_stored(fleet: Fleet, tmp_path: Path) -> None:
    path = build("bert", tmp_path / "model")

    for request in ({"kind": "reranker"}, {"pooling": "splade"}, {"extra_args": ("--kind", "classifier")}):
        with pytest.raises(InvalidConfig, match=r"kind = |pooling "):
            await fleet.manager.create(InstanceSpec(name="a", model_id=str(path), **request))  # type: ignore[arg-type]
    assert fleet.manager.list() == []


HOST = "127.0.0.1"


@pytest.fixture
def start() -> int:
    """The first of five ports in a row that are free now."""
    return next(port for port in range(21000, 32000, 7) if all(is_free(HOST, port + step) for step in range(5)))


@pytest.fixture
def listeners() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def listen(held: ExitStack, port: int) -> None:
    listener = held.enter_context(socket.socket())
    listener.bind((HOST, port))
    listener.listen()


@pytest.mark.clause("M5.2-ports")
def test_ports_are_handed_out_in_turn_so_that_one_given_up_rests(start: int) -> None:
    ports = Ports(HOST, start, start + 3, {})

    assert [ports.allocate(()) for _ in range(4)] == [start, start + 1, start + 2, start]


@pytest.mark.clause("M5.2-ports")
def test_taken_reserved_and_bound_ports_are_passed_over(start: int, listeners: ExitStack) -> None:
    listen(listeners, start + 2)
    ports = Ports(HOST, start, start + 5, {start + 1: "the API port"})

    assert ports.allocate({start}) == start + 3


@pytest.mark.clause("M2.4-no-port")
def test_a_full_range_says_so(start: int) -> None:
    ports = Ports(HOST, start, start + 2, {})

    with pytest.raises(PortAllocationFailed, match="Could not find free port in range"):
        ports.allocate({start, start + 1})


def test_a_free_port_may_be_had_by_number(start: int) -> None:
    assert Ports(HOST, 1024, 1025, {}).check(start, {}) == start


@pytest.mark.parametrize("port", [-1, 80, 1023, 65536])
def test_a_port_outside_the_unprivileged_range_is_refused(port: int) -> None:
    with pytest.raises(InvalidPort):
        Ports(HOST, 8080, 8180, {}).check(port, {})


def test_a_conflict_names_the_holder(start: int, listeners: ExitStack) -> None:
    listen(listeners, start)
    ports = Ports(HOST, 8080, 8180, {9000: "the API port"})

    for port, holders, holder in [
        (8085, {8085: "bge"}, "instance 'bge'"),
        (9000, {}, "the API port"),
        (start, {}, "another process"),
    ]:
        with pytest.raises(PortConflict, match=f"Port {port} already in use by {holder}"):
            ports.check(port, holders)


@pytest.mark.clause("M2.4-prometheus-port")
def test_prometheus_ports_count_upwards_and_never_repeat() -> None:
    ports = Ports(HOST, 8080, 8180, {9100: "the API port"})
    first = ports.allocate_prometheus(())

    assert first > 9100
    assert ports.allocate_prometheus({first + 1}) > first + 1


@pytest.mark.clause("M2.4-prometheus-port")
def test_prometheus_ports_begin_again_after_the_last_port() -> None:
    ports = Ports(HOST, 8080, 8180, {}, prometheus_start=LAST_PORT - 99)

    found = [ports.allocate_prometheus({LAST_PORT}) for _ in range(250)]
    assert set(found) <= set(range(LAST_PORT - 99, LAST_PORT))
    assert len(set(found)) > 50  # in turn; other programs may have some of them
