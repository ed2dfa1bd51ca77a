"""Which tests of `test_sequences.py` show which clauses, and where."""

from __future__ import annotations

from tests.conformance.case import BY_METADATA, GRPC_SURFACES, MUX, PORT, Sequel

ALONE = (PORT,)

SEQUELS: tuple[Sequel, ...] = (
    Sequel("1.4 overloaded", "test_a_full_instance_is_429_at_once", ALONE),
    Sequel("1.4 NaN vector", "test_a_vector_with_nan_is_424", ALONE),
    Sequel("1.4 NaN score", "test_a_score_that_is_nan_is_424", ALONE),
    Sequel("2.4 Overloaded", "test_a_full_instance_is_429_at_once", ALONE),
    Sequel("2.4 NaN", "test_nan_over_grpc_is_internal", GRPC_SURFACES),
    Sequel("2.4 unknown method", "test_an_unknown_method_is_unimplemented", (PORT, MUX)),
    Sequel("2.6 health", "test_a_vector_with_nan_is_424", ALONE),
    Sequel("2.6 health", "test_health_is_that_of_the_kind", ALONE),
    Sequel("2.6 reflection", "test_reflection_needs_no_key", ALONE),
    Sequel("9.7 streams never overload", "test_thousands_of_messages_overload_nothing", ALONE),
    Sequel("9.7 a stopped server finishes its calls", "test_a_stopped_instance_finishes_its_calls", ALONE),
    Sequel("11.1 NaN is never sent", "test_nan_fails_its_own_row", (MUX,)),
    Sequel("mux 1.10 reflection", "test_the_mux_lists_its_services", (MUX,)),
    Sequel("mux health", "test_the_mux_has_a_health_for_every_instance", (MUX,)),
    Sequel("mux tei.v1 without a name", "test_without_a_name_the_choices_are_told", (BY_METADATA,)),
)
