"""The ledger judges by its own books and by what the system reports, and books each worker once."""

from teimgr.control.ledger.ledger import HEADROOM_BYTES, Footprint, Ledger, Place, Reservation, Shortage

MIB = 2**20
SMALL = Footprint(host_bytes=100 * MIB, loading_bytes=150 * MIB)
CPU, CARD = Place(), Place("", "GPU-1")


def _reserved(ledger: Ledger, footprint: Footprint = SMALL, place: Place = CPU, name: str = "a") -> Reservation:
    found = ledger.reserve(name, 0, footprint, place)
    assert isinstance(found, Reservation), found
    return found


def test_a_loading_worker_holds_its_peak_and_a_loaded_one_what_was_measured() -> None:
    ledger = Ledger(host_budget=400 * MIB)
    first = _reserved(ledger)
    assert ledger.free("") == 250 * MIB
    assert ledger.settle(first, Footprint(host_bytes=90 * MIB, source="measured")) is None
    assert ledger.free("") == 310 * MIB


def test_two_loads_are_never_judged_by_the_same_free_bytes() -> None:
    ledger = Ledger()
    ledger.report("", "host memory", 1000 * MIB, 200 * MIB + HEADROOM_BYTES)
    first = _reserved(ledger)
    refused = ledger.reserve("b", 0, SMALL, CPU)
    assert isinstance(refused, Shortage)
    assert (refused.needed_bytes, refused.free_bytes, refused.may_pass) == (150 * MIB, 100 * MIB, False)
    ledger.settle(first, Footprint(host_bytes=20 * MIB))
    ledger.report("", "host memory", 1000 * MIB, 180 * MIB + HEADROOM_BYTES)
    assert ledger.judge(SMALL, CPU) is None  # its 20 MiB are in what the system reports


def test_what_a_loaded_worker_may_still_take_is_not_promised_again() -> None:
    """Its largest batch and its cache are reserved, and the system reports them free until they are used."""
    ledger, idle = Ledger(), Footprint(host_bytes=20 * MIB)
    ledger.report("", "host memory", 1000 * MIB, 200 * MIB + HEADROOM_BYTES)
    first = _reserved(ledger)
    ledger.settle(first, Footprint(host_bytes=90 * MIB), idle)
    ledger.report("", "host memory", 1000 * MIB, 180 * MIB + HEADROOM_BYTES)
    assert ledger.free("") == 110 * MIB
    ledger.settle(first, Footprint(host_bytes=60 * MIB))  # a batch is computed
    assert ledger.free("") == 110 * MIB, "before the system reports it"
    ledger.report("", "host memory", 1000 * MIB, 140 * MIB + HEADROOM_BYTES)
    assert ledger.free("") == 110 * MIB
    tried = ledger.copy()
    tried.release_unreported(tried.held_by("a")[0])
    assert (tried.free(""), ledger.free("")) == (200 * MIB, 110 * MIB)


def test_what_an_adopted_worker_takes_is_in_every_report_already() -> None:
    ledger, taken = Ledger(), Footprint(host_bytes=50 * MIB, device_bytes=300 * MIB)
    ledger.report("", "host memory", 1000 * MIB, 500 * MIB)
    ledger.report("GPU-1", "GPU 0", 1000 * MIB, 700 * MIB, is_card=True)
    held = ledger.hold("a", 0, Footprint(host_bytes=0), CARD, is_settled=True)
    ledger.settle(held, Footprint(host_bytes=80 * MIB, device_bytes=300 * MIB), taken)
    assert (ledger.free("GPU-1"), ledger.free("")) == (700 * MIB, 470 * MIB - HEADROOM_BYTES)


def test_a_report_of_the_host_shows_nothing_of_a_card() -> None:
    ledger = Ledger()
    ledger.report("", "host memory", 1000 * MIB, 500 * MIB)
    ledger.report("GPU-1", "GPU 0", 1000 * MIB, 800 * MIB, is_card=True)
    held = _reserved(ledger, Footprint(host_bytes=50 * MIB, device_bytes=300 * MIB), CARD)
    ledger.settle(held, held.footprint)
    ledger.report("", "host memory", 1000 * MIB, 450 * MIB)
    assert ledger.free("GPU-1") == 500 * MIB


def test_the_lesser_of_budget_and_system_decides() -> None:
    ledger = Ledger(host_budget=1000 * MIB)
    ledger.report("", "host memory", 8000 * MIB, 100 * MIB + HEADROOM_BYTES)
    assert ledger.free("") == 100 * MIB
    ledger.report("", "host memory", 8000 * MIB, 5000 * MIB)
    assert ledger.free("") == 1000 * MIB
    refused = ledger.judge(Footprint(host_bytes=2000 * MIB), CPU)
    assert refused is not None
    assert refused.reason == (
        "needs 2000 MiB of host memory, 1000 MiB are free "
        "(budget 1000, 0 reserved, 5000 free by the system, 128 of them kept free)"
    )


def test_a_ledger_that_does_not_refuse_books_what_does_not_fit() -> None:
    ledger = Ledger(host_budget=100 * MIB, refuses=False)
    _reserved(ledger.copy())
    _reserved(ledger)
    assert ledger.reserved("") == 150 * MIB


def test_a_load_that_fits_once_another_has_loaded_may_pass() -> None:
    ledger = Ledger(host_budget=250 * MIB)
    _reserved(ledger)
    refused = ledger.judge(Footprint(host_bytes=150 * MIB), CPU)
    assert refused is not None
    assert refused.may_pass
    too_large = ledger.judge(Footprint(host_bytes=160 * MIB), CPU)
    assert too_large is not None
    assert not too_large.may_pass


def test_a_worker_on_a_card_is_judged_and_booked_on_the_card_and_on_its_host() -> None:
    ledger = Ledger(host_budget=400 * MIB, card_budget=1000 * MIB)
    on_card = Footprint(host_bytes=300 * MIB, device_bytes=800 * MIB)
    held = _reserved(ledger, on_card, CARD)
    assert (ledger.free(""), ledger.free("GPU-1")) == (100 * MIB, 200 * MIB)
    refused = ledger.judge(Footprint(host_bytes=50 * MIB, device_bytes=300 * MIB), CARD)
    assert refused is not None
    assert refused.device == "GPU-1"
    refused = ledger.judge(Footprint(host_bytes=150 * MIB, device_bytes=100 * MIB), CARD)
    assert refused is not None
    assert refused.device == ""
    ledger.release(held)
    ledger.release(held)
    assert (ledger.free(""), ledger.free("GPU-1")) == (400 * MIB, 1000 * MIB)


def test_a_worker_above_its_reservation_raises_it_and_a_later_lower_reading_does_not_lower_it() -> None:
    ledger = Ledger(host_budget=1000 * MIB)
    held = _reserved(ledger, Footprint(host_bytes=100 * MIB))
    overrun = ledger.settle(held, Footprint(host_bytes=120 * MIB, source="measured"))
    assert overrun is not None
    assert (overrun.reserved_bytes, overrun.measured_bytes) == (100 * MIB, 120 * MIB)
    assert ledger.settle(held, Footprint(host_bytes=110 * MIB, source="measured")) is None
    assert ledger.free("") == 880 * MIB


def test_what_workers_take_beyond_a_budget_is_told() -> None:
    ledger = Ledger(host_budget=110 * MIB)
    held = _reserved(ledger, Footprint(host_bytes=100 * MIB))
    assert (ledger.excess(""), ledger.excess("GPU-1")) == (0, 0)
    ledger.settle(held, Footprint(host_bytes=120 * MIB))
    assert ledger.excess("") == 10 * MIB


def test_a_copy_tries_decisions_without_an_effect_here() -> None:
    ledger = Ledger(host_budget=400 * MIB)
    _reserved(ledger)
    tried = ledger.copy()
    _reserved(tried, name="b")
    tried.release(tried.held_by("a")[0])
    assert (tried.free(""), ledger.free("")) == (250 * MIB, 250 * MIB)
    assert [each.instance for each in ledger.accounts[""].held] == ["a"]


def test_without_a_budget_and_a_report_nothing_is_refused() -> None:
    ledger = Ledger()
    assert ledger.free("") is None
    _reserved(ledger, Footprint(host_bytes=2**50))
