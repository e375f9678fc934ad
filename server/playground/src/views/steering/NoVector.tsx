// A view about steering while no vector is stored.
import { EXAMPLE_NAME, EXAMPLE_PAIRS, TRAINING, trainExample } from "../../lib/example";
import { plural } from "../../lib/format";
import { useTask } from "../../lib/task";
import { ErrorNote, Working } from "../../parts/controls";
import { Icon } from "../../parts/Icon";

export function NoVector({ model }: { model: string | undefined }) {
  const task = useTask();
  const train = (): void => task.run((signal) => trainExample(model, signal));
  const [pair] = EXAMPLE_PAIRS;
  return (
    <section class="no-vector" aria-labelledby="no-vector-title">
      <h2 id="no-vector-title">No steering vector is stored yet{model && ` for ${model}`}</h2>
      <p>
        A vector is a direction of the model's activations. It is trained from pairs of texts that
        differ in one thing only: here {plural(EXAMPLE_PAIRS.length, "pair")} of stories, each with
        a happy and with a sad end.
      </p>
      <dl class="example-pair">
        <dt>Positive</dt>
        <dd>{pair?.positive}</dd>
        <dt>Negative</dt>
        <dd>{pair?.negative}</dd>
      </dl>
      <div class="actions">
        <button type="button" class="run" onClick={train} disabled={task.isRunning}>
          <Icon name="plus" /> Train “{EXAMPLE_NAME}” from these pairs
        </button>
        {task.isRunning ? <Working words={TRAINING} /> : <a href="#vectors">Bring pairs or a file of your own</a>}
      </div>
      <ErrorNote error={task.error} />
    </section>
  );
}
