"""`PUT` of overrides, adapters, sparse autoencoders and variants, which are stored by name."""

from typing import Annotated, Any

from fastapi import Query, Request, Response

from logsteer.errors import api_error
from logsteer.schemas import (
    AdapterCard,
    AdapterList,
    OverrideCard,
    OverrideList,
    SaeCard,
    SaeList,
    VariantCard,
    VariantList,
    VariantRequest,
)
from logsteer.schemas.steering import VectorName
from logsteer.schemas.vectors import SaeQuery
from logsteer_server.api.dependencies import (
    ModelsDep,
    StoresDep,
    StoreThreadsDep,
)
from logsteer_server.api.respond import answer
from logsteer_server.api.routes.resources import (
    OVERWRITE,
    READ_BYTES,
    answer_upload,
    describe_file,
    describe_form,
    make_router,
    open_form,
    open_upload,
    take_turn,
    write_body,
)
from logsteer_server.contract.jobs import (
    CheckAdapterJob,
    CheckAdapterOutput,
    CheckOverrideJob,
    CheckOverrideOutput,
    Feature,
)
from logsteer_server.contract.plan import Adapter
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.interventions.references import check_feature
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.stores.formats.sae_file import SaeFile, check_sae, join_sae
from logsteer_server.stores.formats.tensor_file import (
    TensorContent,
    join_files,
    read_adapter,
    read_direction,
)
from logsteer_server.stores.store import (
    ADAPTERS,
    OVERRIDES,
    SAES,
    VARIANTS,
    StoredContent,
    stamp,
)

overrides = make_router(OVERRIDES, OverrideList)
adapters = make_router(
    ADAPTERS,
    AdapterList,
    "\n\nAn engine that has it loaded forgets it when it needs its place for another.",
)
saes = make_router(SAES, SaeList)
variants = make_router(VARIANTS, VariantList)

ADAPTER_FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
SAE_FILES = {"config": "cfg.json", "weights": "sae_weights.safetensors"}
LABELS = "labels"


def _find_owner(
    models: ModelRegistry, name: str | None, feature: Feature
) -> tuple[ResidentModel, dict[str, Any]]:
    """Return the model that an upload is for, and the fields of its card that say so.

    Errors: APIError where there is no such model, or its engine lacks the feature.
    """
    owner = models.find(name)
    _, info = owner.require()
    check_feature(feature, info, "model")
    return owner, {"model": owner.id, "weights_digest": owner.provenance().weights_digest}


@overrides.put(
    "/overrides/{name:stored}",
    responses={200: {"model": OverrideCard}},
    openapi_extra=describe_file(
        "A safetensors file: for each parameter that moves, a tensor of its shape under its name "
        "in transformers' state_dict."
    ),
)
async def upload_override(
    name: VectorName,
    request: Request,
    models: ModelsDep,
    stores: StoresDep,
    threads: StoreThreadsDep,
    model: Annotated[str | None, Query(description="Whose parameters; null: the only one.")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> Response:
    """Store the direction in the file under this name."""
    owner, asked = _find_owner(models, model, "override")

    async def check(found: StoredContent, content: TensorContent) -> OverrideCard:
        fit = await owner.check(CheckOverrideJob(shapes=content.shapes))
        assert isinstance(fit, CheckOverrideOutput)
        return OverrideCard(
            name=name,
            sha256=found.sha256,
            tensors=len(content.shapes),
            moved=fit.moved,
            total=fit.total,
            norm=content.norm,
            bytes=upload.size,
            created=stamp(),
            **asked,
        )

    store = stores.overrides.of_writable(name)
    async with open_upload(request, store.receive, name, threads) as upload:
        await write_body(request, upload, threads)
        return await answer_upload(
            request,
            name,
            upload,
            store,
            read_direction,
            check,
            overwrite=overwrite,
            **asked,
        )


@adapters.put(
    "/adapters/{name:stored}",
    responses={200: {"model": AdapterCard}},
    openapi_extra=describe_form(
        "What PEFT saves: adapter_config.json as `config`, and adapter_model.safetensors as "
        "`weights`.",
        ADAPTER_FILES,
    ),
)
async def upload_adapter(
    name: VectorName,
    request: Request,
    models: ModelsDep,
    stores: StoresDep,
    threads: StoreThreadsDep,
    model: Annotated[str | None, Query(description="Whose adapter; null: the only one.")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> Response:
    """Load the adapter and store it under this name."""
    owner, asked = _find_owner(models, model, "adapter")

    async def check(found: StoredContent, content: dict[str, Any]) -> AdapterCard:
        fits = await owner.check(CheckAdapterJob(adapter=Adapter(found.source, found.sha256)))
        assert isinstance(fits, CheckAdapterOutput)
        return AdapterCard(
            name=name,
            sha256=found.sha256,
            updated=fits.updated,
            bytes=upload.size,
            created=stamp(),
            **content,
            **asked,
        )

    store = stores.adapters.of_writable(name)
    async with (
        open_upload(request, store.receive, name, threads) as upload,
        open_form(request, upload, ADAPTER_FILES) as files,
    ):
        async with take_turn(request, READ_BYTES):
            config, weights = await files["config"].read(), files["weights"].file
            await threads.run(join_files, config, weights, upload.write)
        return await answer_upload(
            request,
            name,
            upload,
            store,
            read_adapter,
            check,
            overwrite=overwrite,
            **asked,
        )


@saes.put(
    "/saes/{name:stored}",
    responses={200: {"model": SaeCard}},
    openapi_extra=describe_form(
        "What SAELens saves: cfg.json as `config`, and sae_weights.safetensors as `weights`; and "
        "`labels`, JSON of feature -> text, where there are any.",
        SAE_FILES,
        LABELS,
    ),
)
async def upload_sae(
    name: VectorName,
    query: Annotated[SaeQuery, Query()],
    request: Request,
    stores: StoresDep,
    threads: StoreThreadsDep,
) -> Response:
    """Store the sparse autoencoder under this name."""

    async def check(found: StoredContent, content: SaeFile) -> SaeCard:
        hint = content.config.get("model_name")
        return SaeCard(
            name=name,
            sha256=found.sha256,
            architecture=content.config.architecture,
            hook=content.hook,
            layer=content.layer,
            width=content.width,
            features=content.size,
            k=content.encoder.k,
            model_hint=None if hint is None else str(hint)[:200],
            labels=len(content.labels),
            bytes=upload.size,
            created=stamp(),
        )

    store = stores.saes.of_writable(name)
    async with (
        open_upload(request, store.receive, name, threads) as upload,
        open_form(request, upload, SAE_FILES, LABELS) as files,
    ):
        config = await files["config"].read()
        labels = await files[LABELS].read() if LABELS in files else None
        place = query.model_dump(include={"layer", "activation_scale"})
        async with take_turn(request, READ_BYTES):
            weights = files["weights"].file
            await threads.run(join_sae, config, labels, place, weights, upload.write)
        return await answer_upload(
            request, name, upload, store, check_sae, check, overwrite=query.overwrite
        )


@variants.put("/variants/{name:stored}", responses={200: {"model": VariantCard}})
async def put_variant(
    name: VectorName,
    body: VariantRequest,
    request: Request,
    models: ModelsDep,
    stores: StoresDep,
    threads: StoreThreadsDep,
) -> Response:
    """Store a steered model under this name, which is then a model in every endpoint."""
    model = models.find(body.model)
    codec, info = model.require()
    if name in models.by_id:
        raise api_error("exists", f"{name} is a resident model: choose another name.", param="name")
    asked = body.model_copy(update={"model": model.id})

    def store() -> VariantCard:
        Interventions.resolve(asked, stores, info, codec)
        return stores.variants.store(name, asked, overwrite=asked.overwrite)

    return answer(request, (await threads.run(store)).model_dump())
