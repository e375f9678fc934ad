"""What parts of a service on Ray wait for of one another."""

from pydantic import BaseModel, Field


class ClusterSettings(BaseModel):
    """Times of a service on Ray; one machine has no use for them."""

    ledger_wait_s: float = Field(
        1.0,
        gt=0,
        description="For an answer of the ledger about a key's limits; then an ingress goes on "
        "with its share of them. For one about an Idempotency-Key twice as long; then it goes on "
        "with what it knows itself.",
    )
    ledger_lease_s: float = Field(
        10.0,
        ge=5,
        description="What is at work in an ingress that is not heard of counts against limits, and "
        "holds its Idempotency-Keys, for so long.",
    )
    ledger_silence_s: float = Field(
        4.0,
        gt=0,
        description="For an answer of the ledger to a health check, one each 2 s; after three "
        "without one it is replaced. Longer where machines are overloaded.",
    )
    load_every_s: float = Field(
        0.1,
        ge=0.02,
        le=1,
        description="How often an actor tells the ledger what it has, where that changes, and an "
        "ingress asks. Longer where hundreds of actors keep the ledger's core busy.",
    )
    ingress_lease_s: float = Field(
        30.0,
        ge=0.1,
        description="An ingress that the coordinator does not hear of for so long is gone, and no "
        "change of models waits for it.",
    )
    failed_retry_s: float = Field(
        60.0,
        gt=0,
        description="A model whose engines were killed or ended too often before it was up is "
        "started again after so long, then after twice as long, up to 16 times as long. One that "
        "fails for a reason that stays is not.",
    )
