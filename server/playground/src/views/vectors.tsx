import { useState } from "preact/hooks";
import { EXAMPLE_NAME, EXAMPLE_PAIRS } from "../lib/example";
import type { VectorCard } from "../lib/vectors";
import { view, type ViewProps } from "../lib/view";
import { ErrorNote } from "../parts/controls";
import { Drop, Segments } from "../parts/fields";
import { useVectors } from "./steering/useVectors";
import "./vectors.css";
import { Panes } from "../parts/Panes";
import { Cosines } from "./vectors/Cosines";
import { Combine, IS_VECTOR, Train, Upload, type MakeState } from "./vectors/Make";
import { writePairs } from "./vectors/pairs";
import { SAE_CONFIG, Saes } from "./vectors/Saes";
import { Stored } from "./vectors/Stored";

type State = MakeState & {
  make: "train" | "upload" | "combine";
  /** The stored vector that is looked at. */
  opened: string;
  search: string;
};

/** Bytes of a file with pairs. */
const MAX_PAIRS = 2 ** 21;

/** The address of Steer with this vector, as it is recommended unless said otherwise. */
function steerWith(card: VectorCard, layer?: number, scale?: number): string {
  const best = card.about.recommendation;
  const query = new URLSearchParams({ vector: card.name });
  if (layer !== undefined) query.set("layers", String(layer));
  const at = scale ?? best?.scale;
  if (at !== undefined) query.set("scale", String(Number(at.toPrecision(3))));
  return `#steer?${query}`;
}

function VectorsView({ state, setState, model, isShown }: ViewProps<State>) {
  const { cards, task } = useVectors(isShown);
  const named = model?.id;
  const [files, setFiles] = useState<File[]>([]);
  const [fileError, setFileError] = useState<unknown>(null);
  const made = { state, setState, model: named, cards: cards ?? [], onMade: (opened: string) => setState({ opened }) };
  const take = (given: FileList | null | undefined): void => {
    const all = [...(given ?? [])];
    setFileError(null);
    if (all.length === 0 || all.some(({ name }) => name === SAE_CONFIG)) {
      setFiles(all);
      setState({ make: "upload" });
    } else if (all.some(({ name }) => IS_VECTOR.test(name))) {
      setFiles(all.filter(({ name }) => IS_VECTOR.test(name)));
      setState({ make: "upload" });
    } else if (all[0] !== undefined && all[0].size <= MAX_PAIRS) {
      all[0].text().then((pairs) => setState({ make: "train", pairs }), setFileError);
    } else if (all[0] !== undefined) {
      setFileError(new Error(`${all[0].name} is neither a vector, .safetensors or .gguf, nor a short text with pairs.`));
    }
  };
  return (
    <Panes
      form={
        <section class="vectors" aria-labelledby="make-title">
          <h2 id="make-title" class="off-screen">
            A new vector
          </h2>
          <Segments
            label="A new vector"
            value={state.make}
            options={[
              { value: "train", label: "Train from pairs" },
              { value: "upload", label: "Upload a file" },
              { value: "combine", label: "Combine", disabled: !cards?.length },
            ]}
            onChange={(make) => setState({ make })}
          />
          <Drop onTake={take}>
            {state.make === "train" && <Train {...made} />}
            {state.make === "upload" && <Upload {...made} files={files} onTake={take} />}
            {state.make === "combine" && <Combine {...made} />}
          </Drop>
          <ErrorNote error={fileError} />
        </section>
      }
    >
      <ErrorNote error={task.error} />
      {cards !== null && (
        <Stored
          cards={cards}
          model={named}
          opened={state.opened}
          search={state.search}
          onSearch={(search) => setState({ search })}
          onOpen={(opened) => setState({ opened })}
          onSteer={(card, layer, scale) => {
            location.hash = steerWith(card, layer, scale);
          }}
        />
      )}
      <Saes />
      {cards !== null && cards.length > 1 && <Cosines cards={cards} />}
    </Panes>
  );
}

export const vectors = view<State>({
  id: "vectors",
  title: "Vectors",
  icon: "vectors",
  lead: "What can the model be steered by?",
  initial: {
    make: "train",
    opened: "",
    search: "",
    name: EXAMPLE_NAME,
    pairs: writePairs(EXAMPLE_PAIRS),
    method: "mean_difference",
    read: "mean",
    whiten: false,
    layers: "",
    combined: "sum",
    parts: [":1"],
    without: "",
  },
  component: VectorsView,
});
