import { EXAMPLE_NAME, EXAMPLE_PAIRS } from "../lib/example";
import type { VectorCard } from "../lib/vectors";
import { view, type ViewProps } from "../lib/view";
import { ErrorNote } from "../parts/controls";
import { Segments } from "../parts/fields";
import { useVectors } from "./steering/useVectors";
import "./vectors.css";
import { Panes } from "../parts/Panes";
import { Cosines } from "./vectors/Cosines";
import { Combine, Train, Upload, type MakeState } from "./vectors/Make";
import { writePairs } from "./vectors/pairs";
import { Stored } from "./vectors/Stored";

type State = MakeState & {
  make: "train" | "upload" | "combine";
  /** The stored vector that is looked at. */
  opened: string;
  search: string;
};

/** The address of Steer with this vector, as it is recommended unless said otherwise. */
function steerWith(card: VectorCard, layer?: number, scale?: number): string {
  const best = card.about.recommendation;
  const query = new URLSearchParams({ vector: card.name });
  if (layer !== undefined) query.set("layers", String(layer));
  const at = scale ?? best?.scales.at(-1);
  if (at !== undefined) query.set("scale", String(Number(at.toPrecision(3))));
  return `#steer?${query}`;
}

function VectorsView({ state, setState, model, isShown }: ViewProps<State>) {
  const { cards, task } = useVectors(isShown);
  const named = model?.id;
  const Make = { train: Train, upload: Upload, combine: Combine }[state.make];
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
          <Make
            state={state}
            setState={setState}
            model={named}
            cards={cards ?? []}
            onMade={(opened) => setState({ opened })}
          />
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
