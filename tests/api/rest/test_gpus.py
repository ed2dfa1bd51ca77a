"""GPUs and hosts of a cluster as REST and the page of metrics show them."""

from __future__ import annotations

from dataclasses import dataclass

from teimgr.api.rest.hosts import GpuReport, Hosts
from teimgr.control.placement.hosts import Gpu, Host, Inventory
from teimgr.observability import catalogue
from teimgr.spec import InstanceSpec, InstanceView, State, WorkerView


@dataclass
class Source:
    inventory: Inventory

    async def read(self) -> Inventory:
        return self.inventory


CARDS = tuple(Gpu(0, f"{host}-0", 1, memory_total_bytes=2, memory_used_bytes=1, node=host) for host in ("one", "two"))
HOSTS = (Host(name="one", cores=4), Host(name="two", cores=2, problem="it is leaving"))
VIEW = InstanceView(
    spec=InstanceSpec(name="a", model_id="m"),
    state=State.RUNNING,
    workers=(WorkerView(replica=0, role="serving", state=State.RUNNING, node="two", gpu="two-0", pid=7),),
)


async def test_cards_of_one_number_on_two_hosts_have_series_of_their_own() -> None:
    page = await GpuReport(Source(Inventory(CARDS, hosts=HOSTS)), lambda: [VIEW]).page()

    assert [sample.labels["gpu"] for sample in page[catalogue.GPU_MEMORY_USED]] == ["one/0", "two/0"]


async def test_hosts_have_their_cards_workers_and_problems() -> None:
    found = await GpuReport(Source(Inventory(CARDS, hosts=HOSTS)), lambda: [VIEW]).hosts()

    hosts = Hosts.model_validate(found).hosts
    assert [(each.name, each.cores, each.gpus, each.workers, each.problem) for each in hosts] == [
        ("one", 4, 1, 0, None),
        ("two", 2, 1, 1, "it is leaving"),
    ]


async def test_cards_and_workers_name_their_host() -> None:
    report = await GpuReport(Source(Inventory(CARDS, hosts=HOSTS)), lambda: [VIEW]).to_dict()

    assert [(each["node"], [worker["pid"] for worker in each["instances"]]) for each in report["gpus"]] == [
        ("one", []),
        ("two", [7]),
    ]
