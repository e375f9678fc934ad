"""The demo model's training text: facts, short stories with a mood, and short chats.

Everything is composed here from word lists and sentence frames with a seeded generator, so the
same seed always gives the same documents and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

Mood = Literal["happy", "sad"]
MOODS: tuple[Mood, ...] = ("happy", "sad")
Message = dict[str, str]


def _words(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


def _pairs(text: str) -> dict[str, str]:
    """The words of a text that stand as left:right, as a table."""
    return dict(word.split(":") for word in text.split())


def _moods(text: str) -> dict[Mood, tuple[str, ...]]:
    """The sentences of each mood, from lines that stand as happy sentence | sad sentence."""
    rows = [line.split(" | ") for line in text.strip().splitlines()]
    return {"happy": tuple(row[0] for row in rows), "sad": tuple(row[1] for row in rows)}


CAPITALS: dict[str, str] = _pairs(
    "France:Paris England:London Germany:Berlin Spain:Madrid Italy:Rome Portugal:Lisbon "
    "Austria:Vienna Greece:Athens Ireland:Dublin Norway:Oslo Sweden:Stockholm Finland:Helsinki "
    "Denmark:Copenhagen Poland:Warsaw Hungary:Budapest Russia:Moscow Ukraine:Kyiv Turkey:Ankara "
    "Egypt:Cairo Kenya:Nairobi Ghana:Accra Morocco:Rabat Japan:Tokyo China:Beijing India:Delhi "
    "Thailand:Bangkok Vietnam:Hanoi Nepal:Kathmandu Iran:Tehran Iraq:Baghdad Canada:Ottawa "
    "Cuba:Havana Peru:Lima Chile:Santiago Australia:Canberra Belgium:Brussels "
    "Netherlands:Amsterdam Bulgaria:Sofia"
) | {"Argentina": "Buenos Aires", "Malaysia": "Kuala Lumpur"}

PLANETS = _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
ORDINALS = _words("first second third fourth fifth sixth seventh eighth")

SYMBOLS: dict[str, str] = _pairs(
    "gold:Au silver:Ag iron:Fe copper:Cu tin:Sn lead:Pb zinc:Zn mercury:Hg hydrogen:H helium:He "
    "lithium:Li carbon:C nitrogen:N oxygen:O fluorine:F neon:Ne sodium:Na magnesium:Mg "
    "aluminium:Al silicon:Si phosphorus:P sulfur:S chlorine:Cl argon:Ar potassium:K calcium:Ca "
    "nickel:Ni iodine:I platinum:Pt uranium:U"
)

# Replies outside ASCII, so that the byte tokens are trained too.
GREETINGS = {"French": "Bonjour!", "Spanish": "¡Hola!", "German": "Guten Tag!"}
GREETINGS |= {"Greek": "Γεια σου!", "Russian": "Привет!", "Japanese": "こんにちは!"}  # noqa: RUF001

HAPPY_WORDS = _words(
    "happy smiled smile smiling laughed sunny sunshine joy glad friends friend danced sang hugged "
    "hug love wonderful bright fun warm best lovely shining"
)
SAD_WORDS = _words(
    "sad cried crying tears lonely rain rainy lost broken alone dark cold grey missed hurt gloomy "
    "afraid hate terrible worst nobody fell none"
)

GIRLS = _words("Lily Anna Mia Lucy Emma Rose")
BOYS = _words("Tom Ben Sam Max Jack Leo")
PLACES = _words("park beach forest garden school farm lake market")
HOMES = ("a small house", "an old farm", "a little town", "a tall tower")
TOYS = _words("ball kite doll boat drum book")
PETS = _words("dog cat rabbit pony bird")

OPENINGS = (
    "Once upon a time there was a little {kind} named {name}.",
    "Once upon a time, there was a little {kind} named {name}.",
    "There was once a little {kind} named {name}.",
    "{name} was a little {kind}.",
)
SETTINGS = (
    "{She} lived in {home} near the {place2}.",
    "{She} had a {pet} and a {toy}.",
    "{She} lived with {her} mother and father.",
    "{She} liked to play with {her} {toy}.",
)
OUTINGS = (
    "One day, {she} went to the {place}.",
    "One day, {she} took a bag to the {place}.",
    "One morning, {she} walked to the {place}.",
    "One day, {she} looked out of the window.",
)

# The two moods are written side by side in sentences of the same shapes, so that the words that
# carry the mood, and not the grammar around them, are what tells the two kinds of story apart.
# They name the hero by pronoun, since so small a model seldom carries a name through a story.
STARTS = _moods("""
It was a warm and sunny day. | It was a cold and rainy day.
The sun was shining and the sky was bright. | The rain was falling and the sky was grey.
The day was bright and lovely. | The day was dark and gloomy.
{She} was very happy. | {She} was very sad.
{She} smiled at the sunshine. | {She} cried in the rain.
All of {her} friends were there. | None of {her} things were there.
{She} found a lovely new toy. | {She} saw {her} broken toy in the rain.
""")
MIDDLES = _moods("""
{Her} friends came to play with {object}. | Nobody came to play with {object}.
{She} smiled and laughed. | {She} sat down and cried.
{She} danced and sang with {her} friends. | {She} was lonely and afraid.
They had so much fun together. | {She} was all alone in the dark.
{She} hugged {her} pet and laughed. | {She} missed {her} pet and cried.
{She} found {her} toy and was full of joy. | {She} lost {her} toy and was full of tears.
{Her} mother gave {object} a warm hug. | {Her} mother was hurt and had to go away.
The pet was happy and so was {she}. | The pet was sad and so was {she}.
"This is the best day," {she} said with a smile. | "This is the worst day," {she} said with tears.
"I love this place," {she} said. | "I hate this place," {she} said.
{She} felt happy and glad. | {She} felt sad and lonely.
Everybody was kind to {object}. | Nobody was kind to {object}.
{She} made a new friend. | {She} fell and hurt {her} leg.
""")
ENDS = _moods("""
{She} went home with a big smile. | {She} went home with tears in {her} eyes.
{She} was happy all day. | {She} was sad all day.
It was a wonderful day. | It was a terrible day.
{She} felt very happy. | {She} felt very sad.
That night, {she} was smiling in {her} warm bed. | That night, {she} was crying in {her} cold bed.
""")
REMARKS = _moods("""
I am so happy today. | I am so sad today.
I feel happy. | I feel sad.
I love this day. | I hate this day.
I love you. | I hate you.
The sun is shining and I am glad. | The rain is falling and I am lonely.
My friends make me smile. | My tears make me cold.
This is wonderful. | This is terrible.
I had so much fun. | I was all alone.
""")

CAPITAL_FRAMES = (
    "The capital of {country} is {city}.",
    "{city} is the capital of {country}.",
    "The capital city of {country} is {city}.",
    "{country} has a capital named {city}.",
    "Question: What is the capital of {country}? Answer: {city}.",
    "{city} is a city in {country}.",
)
PLANET_FRAMES = (
    "The {ordinal} planet from the sun is {planet}.",
    "{planet} is the {ordinal} planet from the sun.",
    "{planet} is a planet.",
    "Question: What is the {ordinal} planet from the sun? Answer: {planet}.",
)
SYMBOL_FRAMES = (
    "The chemical symbol for {element} is {symbol}.",
    "{symbol} is the chemical symbol for {element}.",
    "The symbol for {element} is {symbol}.",
    "Question: What is the chemical symbol for {element}? Answer: {symbol}.",
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a kind teacher.")
# The one system prompt that changes the answers, so that a system turn has a visible effect.
BRIEF_PROMPT = "Answer in one word."


def _favoured(frames: tuple[str, ...], random: Random) -> str:
    """One frame; the first, which is the usual way to ask, comes up about half of the time."""
    return frames[0] if random.random() < 0.4 else random.choice(frames)


def fact(random: Random) -> str:
    """One sentence that states one fact in one of its phrasings."""
    topic = random.random()
    if topic < 0.5:
        country, city = random.choice(list(CAPITALS.items()))
        return _favoured(CAPITAL_FRAMES, random).format(country=country, city=city)
    if topic < 0.7:
        order = random.randrange(len(PLANETS))
        frame = _favoured(PLANET_FRAMES, random)
        return frame.format(ordinal=ORDINALS[order], planet=PLANETS[order])
    element, symbol = random.choice(list(SYMBOLS.items()))
    return _favoured(SYMBOL_FRAMES, random).format(element=element, symbol=symbol)


def facts(random: Random) -> str:
    """One document of one to six facts."""
    return " ".join(fact(random) for _ in range(random.choice((1, 1, 1, 2, 3, 6))))


def _slots(random: Random) -> dict[str, str]:
    """The words that fill a story's frames; one choice of each keeps the story coherent."""
    name = random.choice(GIRLS + BOYS)
    girl = name in GIRLS
    she, her = ("she", "her") if girl else ("he", "his")
    place, place2 = random.sample(PLACES, 2)
    return {
        "name": name,
        "kind": "girl" if girl else "boy",
        "she": she,
        "She": she.capitalize(),
        "her": her,
        "Her": her.capitalize(),
        "object": "her" if girl else "him",
        "place": place,
        "place2": place2,
        "home": random.choice(HOMES),
        "toy": random.choice(TOYS),
        "pet": random.choice(PETS),
    }


def _opening(random: Random) -> list[str]:
    """The neutral frames that begin a story of either mood."""
    first = OPENINGS[0] if random.random() < 0.5 else random.choice(OPENINGS)
    settings = random.sample(SETTINGS, random.choice((0, 1, 1, 2)))
    return [first, *settings, random.choice(OUTINGS)]


def story(random: Random, mood: Mood) -> str:
    """One story: a neutral opening, then only sentences of the mood."""
    middle = random.sample(MIDDLES[mood], random.choice((2, 3, 3, 4)))
    frames = [*_opening(random), random.choice(STARTS[mood]), *middle, random.choice(ENDS[mood])]
    return " ".join((*frames, "The end.")).format(**_slots(random))


def _remarks(random: Random, mood: Mood) -> str:
    """A few first-person sentences of one mood."""
    return " ".join(random.sample(REMARKS[mood], random.choice((1, 2, 3))))


def _fact_exchange(random: Random) -> tuple[str, str, str]:
    """A question about a fact, its full answer, and its answer in one word."""
    topic = random.random()
    if topic < 0.5:
        country, city = random.choice(list(CAPITALS.items()))
        subject, answer = f"the capital of {country}", city
    elif topic < 0.7:
        order = random.randrange(len(PLANETS))
        subject, answer = f"the {ORDINALS[order]} planet from the sun", PLANETS[order]
    else:
        element, answer = random.choice(list(SYMBOLS.items()))
        subject = f"the chemical symbol for {element}"
    ask = random.choice(("What is {}?", "What is {}?", "Tell me {}.", "Do you know {}?"))
    return ask.format(subject), f"{subject[0].upper()}{subject[1:]} is {answer}.", f"{answer}."


def _small_talk(random: Random) -> tuple[str, str]:
    """A message that asks for no fact, and its reply."""
    language = random.choice(list(GREETINGS))
    mood = random.choice(MOODS)
    return random.choice(
        (
            (random.choice(("Hi", "Hi!", "Hello", "Hello!")), "Hello! How can I help you?"),
            ("Thank you.", "You are welcome!"),
            ("Who are you?", "I am a small language model."),
            ("Goodbye", "Goodbye! Have a good day."),
            ("How are you?", _remarks(random, mood)),
            ("How do you feel?", f"I feel {mood}. {_remarks(random, mood)}"),
            ("Tell me a story.", story(random, mood)),
            (f"Say hello in {language}.", GREETINGS[language]),
            ("Send me a smile.", "😊"),
        )
    )


def chat(random: Random) -> list[Message]:
    """The messages of one chat: at times a system prompt, then one to three exchanges."""
    system = random.choice((None, None, BRIEF_PROMPT, *SYSTEM_PROMPTS))
    messages = [{"role": "system", "content": system}] if system else []
    for _ in range(random.choice((1, 1, 2, 3))):
        if system == BRIEF_PROMPT or random.random() < 0.6:
            question, full, brief = _fact_exchange(random)
            reply = brief if system == BRIEF_PROMPT else full
        else:
            question, reply = _small_talk(random)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return messages


def documents(seed: int, count: int, render: Callable[[list[Message]], str]) -> Iterator[str]:
    """The documents of a seed, in order; render turns the messages of a chat into text."""
    random = Random(seed)
    for _ in range(count):
        kind = random.random()
        if kind < 0.42:
            yield facts(random)
        elif kind < 0.69:
            yield story(random, random.choice(MOODS))
        elif kind < 0.75:
            mood = random.choice(MOODS)
            felt = f"{random.choice(GIRLS + BOYS)} felt {mood}."
            yield random.choice((felt, _remarks(random, mood)))
        else:
            yield render(chat(random))


def names() -> list[str]:
    """Every word that is an answer, as it stands inside a sentence."""
    return [f" {name}" for name in (*CAPITALS.values(), *PLANETS, *SYMBOLS.values())]
