"""What a model's engine can do beside scoring and generating, as requests need it."""

from logsteer.errors import api_error
from logsteer_server.contract.jobs import EngineInfo, explain_missing


def check_feature(feature: str, info: EngineInfo, param: str | None) -> None:
    """Errors: APIError `unsupported_by_engine` where the model's engine lacks a feature."""
    if feature not in info.features:
        detail = explain_missing(feature, info.engine)
        raise api_error("unsupported_by_engine", f"{detail[0].upper()}{detail[1:]}.", param=param)
