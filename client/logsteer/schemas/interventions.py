"""Interventions: what a request changes of the model for itself, and what an answer says of it."""

from pydantic import Field

from logsteer.schemas.adapters import UsedAdapter
from logsteer.schemas.common import Reply, Request
from logsteer.schemas.overrides import ParameterOverride, UsedOverride
from logsteer.schemas.steering import ProbeRequest, Steering, SteeringReceipt, VectorName


class ParameterFields(Request):
    """Other parameters, for one request alone."""

    override: ParameterOverride | None = Field(
        default=None,
        description="A stored direction v by name, and eta: the parameters are theta + eta v.",
    )
    adapter: VectorName | None = Field(
        default=None, description="Name of a stored LoRA adapter that is added to the parameters."
    )


class InterventionFields(ParameterFields):
    """Other parameters and other activations, for one request alone."""

    steering: Steering | None = Field(
        default=None,
        description="Steer the model. Tokens before the first scored one are the prompt.",
    )


class ActivationFields(InterventionFields):
    """Other parameters and activations, and what is read of the activations."""

    probes: list[ProbeRequest] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Directions to read at every token that is scored or generated. Results with "
        "readings are never taken from the result cache.",
    )


class AppliedParameters(Reply):
    """The parameters that an answer was computed under, where they are not the model's own."""

    override: UsedOverride | None = None
    adapter: UsedAdapter | None = None


class AppliedInterventions(AppliedParameters):
    """What an answer was computed under."""

    steering: SteeringReceipt | None = None
