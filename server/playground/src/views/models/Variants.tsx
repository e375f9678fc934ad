// The stored variants: names that stand for a model and what its requests are computed with.
import { useState } from "preact/hooks";
import { call } from "../../lib/api";
import { refreshModels, variants, type VariantCard } from "../../lib/models";
import { Confirm } from "../../parts/Confirm";
import { Icon } from "../../parts/Icon";
import { Table, type TableColumn } from "../../parts/Table";

type Steered = { vectors: { name?: string; scale?: number; layers?: number[] }[] };

function describe({ steering, adapter, override, chat_template_kwargs: variables }: VariantCard): string {
  const vectors = ((steering as Steered | null)?.vectors ?? []).map(
    ({ name = "a vector of its own", scale = 1, layers }) =>
      `${name} × ${scale}${layers ? ` at ${layers.join(", ")}` : ""}`,
  );
  return [
    ...vectors,
    ...(adapter ? [`adapter ${adapter}`] : []),
    ...(override ? [`override ${override.name}`] : []),
    ...(variables ? [JSON.stringify(variables)] : []),
  ].join(" + ");
}

export function Variants() {
  const [doomed, setDoomed] = useState<VariantCard | null>(null);
  const columns: TableColumn<VariantCard>[] = [
    { name: "Variant", value: ({ name }) => name, isText: true },
    { name: "of the model", value: ({ model }) => model, isText: true },
    { name: "with", value: describe, isText: true },
    { name: "Description", value: ({ description }) => description, isText: true },
    {
      name: "Deletion",
      value: () => null,
      show: (card) => (
        <button type="button" class="quiet" aria-label={`Delete ${card.name}`} onClick={() => setDoomed(card)}>
          <Icon name="trash" />
        </button>
      ),
    },
  ];
  return (
    <section class="sheet" aria-labelledby="variants-title">
      <h2 id="variants-title">Variants</h2>
      {variants.value.length === 0 ? (
        <p class="hint">
          None. A variant is a name for a model and its steering, and a model to every client; <a href="#steer">Steer</a> keeps one.
        </p>
      ) : (
        <Table label="Stored variants" rows={variants.value} columns={columns} />
      )}
      <Confirm
        title={doomed && `Delete ${doomed.name}?`}
        keep="Keep it"
        action={
          <>
            <Icon name="trash" /> Delete
          </>
        }
        onConfirm={async (signal) => {
          await call("delete", "/variants/{name}", undefined, { path: { name: doomed?.name ?? "" }, signal });
          await refreshModels();
        }}
        onClose={() => setDoomed(null)}
      >
        Requests that name it as their model will fail. Its vector, adapter or override stays.
      </Confirm>
    </section>
  );
}
