// The openai package for node: a completion, a conversation, and the latter streamed.
import OpenAI from 'openai'

const [, , url, model, prompt] = process.argv
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
const common = { model, max_tokens: 8, temperature: 0 }
const text = await client.completions.create({ ...common, prompt, logprobs: 1 })
const messages = [{ role: 'user', content: prompt }]
const chat = await client.chat.completions.create({ ...common, messages })
let streamed = ''
for await (const part of await client.chat.completions.create({ ...common, messages, stream: true }))
  streamed += part.choices[0]?.delta?.content ?? ''
const [{ text: completion, logprobs }] = text.choices
const [{ message }] = chat.choices
console.log(
  JSON.stringify({ completion, logprobs: logprobs.token_logprobs, chat: message.content, streamed }),
)
