"""What a model's engine can do beside scoring and generating, as requests need it."""

from logsteer.errors import api_error
from logsteer_server.contract.engine import EngineInfo


def check_feature(feature: str, info: EngineInfo, param: str | None) -> None:
    """Errors: APIError `unsupported_by_engine` where the model's engine lacks a feature."""
    if detail := info.lacks.get(feature):
        raise api_error("unsupported_by_engine", f"{detail[0].upper()}{detail[1:]}.", param=param)
