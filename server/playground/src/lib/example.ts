// A vector to begin with: what happy stories have, and sad ones have not.
import { call, ServerProblem } from "./api";
import { refreshVectors } from "./vectors";

export const EXAMPLE_NAME = "mood";

/** What a training does, for those who wait for it. */
export const TRAINING = "Reading the texts, then trying layers and scales";

/** The same stories twice: they differ in the vector's meaning. */
const STORIES: [begin: string, happy: string, sad: string][] = [
  [
    "There was once a little girl named Lily. One morning, she walked to the park.",
    'She was very happy. She found her toy and was full of joy. "I love this place," she said. She felt very happy. The end.',
    'She was very sad. She lost her toy and was full of tears. "I hate this place," she said. She felt very sad. The end.',
  ],
  [
    "Max was a little boy. He lived in a tall tower near the school. One day, he looked out of the window.",
    "He smiled at the sunshine. He hugged his pet and laughed. Everybody was kind to him. He felt very happy. The end.",
    "He cried in the rain. He missed his pet and cried. Nobody was kind to him. He felt very sad. The end.",
  ],
  [
    "There was once a little girl named Mia. One day, she went to the market.",
    "She found a lovely new toy. Her mother gave her a warm hug. It was a wonderful day. The end.",
    "She saw her broken toy in the rain. Her mother was hurt and had to go away. It was a terrible day. The end.",
  ],
  [
    "There was once a little girl named Rose. One day, she took a bag to the market.",
    "The day was bright and lovely. They had so much fun together. She danced and sang with her friends. She went home with a big smile. The end.",
    "The day was dark and gloomy. She was all alone in the dark. She was lonely and afraid. She went home with tears in her eyes. The end.",
  ],
  [
    "Once upon a time, there was a little girl named Rose. One day, she took a bag to the school.",
    "They had so much fun together. Everybody was kind to her. She felt happy and glad. The end.",
    "She was all alone in the dark. Nobody was kind to her. She felt sad and lonely. The end.",
  ],
  [
    "Once upon a time there was a little boy named Max. One morning, he walked to the park.",
    "He smiled at the sunshine. He smiled and laughed. He made a new friend. He was happy all day. The end.",
    "He cried in the rain. He sat down and cried. He fell and hurt his leg. He was sad all day. The end.",
  ],
  [
    "Once upon a time there was a little boy named Tom. One day, he went to the school.",
    'All of his friends were there. "I love this place," he said. He felt happy and glad. The end.',
    'None of his things were there. "I hate this place," he said. He felt sad and lonely. The end.',
  ],
  [
    "Once upon a time there was a little boy named Sam. One day, he went to the school.",
    "It was a warm and sunny day. He smiled and laughed. His mother gave him a warm hug. He felt very happy. The end.",
    "It was a cold and rainy day. He sat down and cried. His mother was hurt and had to go away. He felt very sad. The end.",
  ],
];

export const EXAMPLE_PAIRS = STORIES.map(([begin, happy, sad]) => ({
  positive: `${begin} ${happy}`,
  negative: `${begin} ${sad}`,
}));

/** What the example is trained by. */
export function exampleRequest(model: string | undefined) {
  return { model, name: EXAMPLE_NAME, pairs: EXAMPLE_PAIRS, read: "mean" as const };
}

/** Train and store it; under a name of its own where another model has the example's. */
export async function trainExample(
  model: string | undefined,
  signal: AbortSignal,
): Promise<void> {
  const train = (name: string) =>
    call("post", "/vectors/train", { ...exampleRequest(model), name } as never, { signal });
  await train(EXAMPLE_NAME).catch((error: unknown) => {
    const isTaken = error instanceof ServerProblem && error.problem.code === "exists";
    if (!isTaken || model === undefined) throw error;
    return train(`${EXAMPLE_NAME}-${model.replace(/[^\w.-]+/g, "-")}`);
  });
  await refreshVectors();
}
