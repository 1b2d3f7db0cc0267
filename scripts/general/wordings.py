"""How the questions of `general` are worded: eight ways for each family, the last four of which only held-out questions have.

`{{}}` are the slots of a fact. The same holds for what surrounds a question that is wordy or in slang.
"""
# ruff: noqa: E501  a wording in a line

from __future__ import annotations

PLAIN: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {country}?", "Which city is the capital of {country}?", "Name the capital city of {country}.",
        "Where is the government of {country} seated, in which capital?",
        "What's the capital city of {country} called?", "Can you tell me the capital of {country}?",
        "{country}: what is its capital?", "Of {country}, which city is the capital?",
    ),
    "country_of_capital": (
        "Which country has {city} as its capital?", "{city} is the capital of which country?",
        "What country is {city} the capital of?", "Name the country whose capital is {city}.",
        "In which country is {city} the capital city?", "Whose capital is {city}?",
        "Which nation is governed from {city}?", "What is the country that has its capital in {city}?",
    ),
    "continent": (
        "On which continent is {country}?", "Which continent is {country} in?", "What continent does {country} belong to?",
        "Name the continent where {country} lies.",
        "In what part of the world, by continent, is {country}?", "{country} is on which continent?",
        "Tell me the continent of {country}.", "Where is {country}: on which continent?",
    ),
    "currency": (
        "What is the currency of {country}?", "Which currency is used in {country}?", "What money do people in {country} pay with?",
        "Name the currency of {country}.",
        "What is the official money of {country} called?", "In which currency are prices given in {country}?",
        "Which currency does one need in {country}?", "What currency does {country} have?",
    ),
    "language": (
        "What is the official language of {country}?", "Which language is official in {country}?",
        "What language do people speak in {country}?", "Name the official language of {country}.",
        "In which language does the government of {country} write?", "What is the main language of {country}?",
        "Which language should I learn for {country}?", "{country}: which language is spoken there officially?",
    ),
    "state_capital": (
        "What is the capital of {state}?", "Which city is the capital of the US state of {state}?",
        "Name the state capital of {state}.", "What city is {state}'s capital?",
        "Where is the state government of {state}, in which city?", "Can you name the capital city of {state}?",
        "{state} is a US state; what is its capital?", "The state of {state} has which capital?",
    ),
    "state_code": (
        "What is the two-letter postal code of {state}?", "Which two letters stand for {state} in an address?",
        "How is {state} abbreviated by the post office?", "Give the postal abbreviation of {state}.",
        "What is the abbreviation of the state of {state}?", "In a US address, what is the code for {state}?",
        "Which state code does {state} have?", "{state} in two letters, please?",
    ),
    "symbol": (
        "What is the chemical symbol of {element}?", "Which symbol does {element} have in the periodic table?",
        "How is {element} written as a chemical symbol?", "Give the symbol for the element {element}.",
        "What letters stand for {element} in chemistry?", "In formulas, which symbol means {element}?",
        "The element {element} has which symbol?", "What is {element}'s symbol in the periodic table?",
    ),
    "element": (
        "Which element has the chemical symbol {symbol}?", "What element is {symbol} in the periodic table?",
        "What does the chemical symbol {symbol} stand for?", "Name the element with the symbol {symbol}.",
        "In chemistry, what is {symbol}?", "{symbol} is the symbol of which element?",
        "Which element do chemists write as {symbol}?", "The symbol {symbol} means which element?",
    ),
    "atomic_number": (
        "What is the atomic number of {element}?", "How many protons does an atom of {element} have?",
        "Which number does {element} have in the periodic table?", "Give the atomic number of {element}.",
        "At which place of the periodic table is {element}?", "How many protons are in the nucleus of {element}?",
        "{element} has which atomic number?", "What number is {element} in the periodic table?",
    ),
    "plural": (
        'What is the plural of "{noun}"?', 'What is the plural form of the word "{noun}"?', 'How do you write more than one "{noun}"?',
        'Give the plural of "{noun}".',
        'One {noun}, two ... what?', 'Which word means several of a "{noun}"?',
        'In English, what does "{noun}" become in the plural?', 'If there are many, what do I write for "{noun}"?',
    ),
    "sum": (
        "What is {a} plus {b}?", "How much is {a} + {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?",
        "What do {a} and {b} make together?", "I have {a} coins and get {b} more. How many do I have?",
        "{a} and {b} added, what is it?", "What number do I get when I add {b} to {a}?",
    ),
    "product": (
        "What is {a} times {b}?", "How much is {a} x {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?",
        "There are {a} bags with {b} apples each. How many apples are there?", "{a} multiplied by {b} is what number?",
        "What number do I get for {a} times {b}?", "How many are {a} groups of {b}?",
    ),
    "difference": (
        "What is {a} minus {b}?", "How much is {a} - {b}?", "Subtract {b} from {a}.", "Calculate {a} minus {b}.",
        "{a} - {b} is what?", "What remains of {a} when {b} are taken away?",
        "How much is {a} minus {b}?", "What number do I get when I take {b} from {a}?",
    ),
    "digits": (
        "How do you write {words} in digits?", "What is {words} as a number in digits?", "Write {words} in figures.",
        "Which digits stand for {words}?",
        "Someone says {words}. Which number do I type?", "What number is {words}?",
        "In digits, what is {words}?", "{words} in figures is what?",
    ),
    "country_of_city": (
        "In which country is {city}?", "Which country is the city of {city} in?",
        "{city} is a city in which country?", "Name the country where {city} lies.",
        "To which country does the city {city} belong?", "If I fly to {city}, in which country do I land?",
        "{city}: which country is that in?", "What country would I find {city} in?",
    ),
    "state_of_city": (
        "In which US state is {city}?", "Which state is the city of {city} in?",
        "{city} is a city in which state of the US?", "Name the US state where {city} lies.",
        "To which US state does the city {city} belong?", "If I move to {city}, in which US state will I live?",
        "{city}: which US state is that in?", "What state of the USA would I find {city} in?",
    ),
    "demonym": (
        "What do you call a person from {country}?", "What is a citizen of {country} called?",
        "What is someone from {country} called in English?", "Which word means a person from {country}?",
        "What are the people of {country} called?", "Somebody was born in {country}; what do we call that nationality?",
        "How do you call someone who comes from {country}?", "{country}: what is the name for its people?",
    ),
    "country_of_people": (
        "Which country does {a_person} come from?", "What country do {people} people live in?",
        "Which country is {a_person} a citizen of?", "Name the country whose people are called {people}.",
        "If somebody is {people}, which country is he from?", "Where are {people} people at home, in which country?",
        "Which country issues {people} passports?", "My neighbor is {people}. What country was she born in?",
    ),
    "superlative": (
        'What is the superlative of "{word}"?', 'What is the superlative form of the adjective "{word}"?',
        'Give the superlative of "{word}".', 'What is the superlative form of "{word}" in English?',
        'In English, what is the superlative form of "{word}"?', 'Tell me the superlative of "{word}".',
        'Which word is the superlative of "{word}"?', 'Of the adjective "{word}", what is the superlative?',
    ),
    "half": (
        "What is half of {number}?", "How much is {number} divided by 2?", "Divide {number} by 2.", "What number is one half of {number}?",
        "We share {number} apples between 2 children. How many does each get?", "What is {number} divided by 2?",
        "How much is one half of {number}?", "What number do I get when I halve {number}?",
    ),
}  # fmt: skip

#: As people write whose first language builds sentences in another way.
SECOND_LANGUAGE: dict[str, tuple[str, ...]] = {
    "capital": ("How is called the capital from {country}?", "Which is the capital city that {country} has it?",
                "The capital of {country}, which one is?", "What for a capital has {country}?"),
    "country_of_capital": ("From which country is {city} the capital?", "{city} it is capital of what country please?",
                           "Of what country {city} is the capital?", "The country where {city} is capital, how it calls?"),
    "continent": ("In which continent does {country} lay?", "{country} is it in what continent?",
                  "To which continent belongs {country}?", "The continent of {country}, which is it?"),
    "currency": ("With which money one pays in {country}?", "How is called the money from {country}?",
                 "What for a currency has {country}?", "In {country} people they use which currency?"),
    "language": ("Which language speaks one in {country}?", "How is called the official language from {country}?",
                 "What for a language has {country} officially?", "In {country} the people speak officially which language?"),
    "state_capital": ("How is called the capital from the state {state}?", "The state {state}, it has which capital?",
                      "Which city it is the capital of {state}?", "What for a capital has the state {state}?"),
    "state_code": ("Which are the two letters from {state} for the post?", "How one shortens {state} in the address?",
                   "The state {state}, with what two letters it is written?", "What for a post code has {state}, with two letters?"),
    "symbol": ("How is the chemical sign from {element}?", "With which letters one writes {element} in the chemistry?",
               "Which symbol has the element {element} in periodic system?", "What for a chemical symbol has {element}?"),
    "element": ("Which element is it, {symbol}, in periodic system?", "What means {symbol} in the chemistry?",
                "The symbol {symbol}, to which element belongs?", "How is called the element with the sign {symbol}?"),
    "atomic_number": ("Which atomic number has {element}?", "How much protons has {element}?",
                      "The element {element}, which number has it in periodic system?", "What for an atomic number has {element}?"),
    "plural": ('How is the plural from "{noun}"?', 'Which is plural form of word "{noun}" please?',
               'The word "{noun}", how it makes the plural?', 'How one says "{noun}" when there is many?'),
    "sum": ("How much makes {a} and {b} together?", "How many is it {a} plus {b}?",
            "{a} with {b} added gives how much?", "What gives {a} plus {b}?"),
    "product": ("How much makes {a} times {b}?", "How many is it {a} multiplied with {b}?",
                "{a} times {b} gives how much?", "What gives {a} multiplied through {b}?"),
    "difference": ("How much makes {a} minus {b}?", "How many stays from {a} when I take {b}?",
                   "{a} minus {b} gives how much?", "What gives {a} when {b} goes away?"),
    "digits": ("How writes one {words} with digits?", "The number {words}, how is it in digits?",
               "With digits, how one writes {words}?", "What for a number is {words} in digits?"),
    "country_of_city": (
        "In what country lays {city}?", "The city {city}, it is in which country?",
        "To which country belongs {city} please?", "How is called the country where is {city}?",
    ),
    "state_of_city": (
        "In what state from the US lays {city}?", "The city {city}, it is in which US state?",
        "To which US state belongs {city} please?", "How is called the US state where is {city}?",
    ),
    "demonym": (
        "How is called a person from {country}?", "How one says to the people that come of {country}?",
        "A human from {country}, how do you call him?", "The people of {country}, how they are named?",
    ),
    "country_of_people": (
        "From what country comes {a_person}?", "The {people} people, they live in which country?",
        "Which country have the {people} people?", "Who is {people}, from which country he comes?",
    ),
    "superlative": (
        'How is the superlative from "{word}"?', 'Which is superlative of adjective "{word}" please?',
        'The word "{word}", how it makes the superlative?', 'What for a superlative has "{word}"?',
    ),
    "half": (
        "How much makes {number} divided through 2?", "Which is the half from {number}?",
        "The half of {number}, how much it is?", "What gives {number} divided with 2?",
    ),
}  # fmt: skip

#: Around a question: {question} begins in lower case where it follows words. The last four are held out.
SLANG = (
    "yo {question}", "{question} lol", "hey so {question} pls", "ok but {question} tho",
    "bruh {question}", "{question} asap thx", "quick one, {question} ty", "ngl idk, {question}",
)  # fmt: skip
SLANG_WORDS = {
    "what is": "whats", "what's": "whats", "you": "u", "are": "r", "people": "ppl", "please": "pls", "because": "cuz",
    "to": "2", "for": "4", "do not": "dont", "tell me": "tell me rn", "and": "n", "how many": "how many",
    "how much": "how much", "with": "w/", "i have": "i got", "can you": "can u", "your": "ur", "going to": "gonna",
}  # fmt: skip
WORDY = (
    "I hope you are having a pleasant day. My niece is preparing for a quiz at school and asked me something that I could "
    "not answer at once, although I am sure that I knew it at her age. {question} Thank you very much in advance for your "
    "time, it is greatly appreciated.",
    "Good morning! We were sitting at breakfast and arguing, as we do most weekends, and nobody wanted to give in. So I said "
    "that I would simply ask somebody who knows. {question} I would be glad to have this settled before lunch, if at all "
    "possible.",
    "Sorry to bother you with something that is probably very simple. I have been filling in a worksheet all evening, my eyes "
    "are tired, and this is the last line that is still empty. {question} After that I can finally go to bed, which I am "
    "looking forward to.",
    "I am writing a small trivia game for a birthday party, with prizes and all, and would like to be sure about every card "
    "before I print it. One of them says the following. {question} There are about forty other cards, but those I have "
    "already checked twice.",
    "Dear assistant, you have helped me before with my crossword, and I was so impressed that I told my neighbors about it. "
    "Today I am stuck again, and the pencil has no eraser left. {question} My neighbors send their regards, by the way, and "
    "so does the dog.",
    "This may sound like an odd thing to ask on a Tuesday, but it has been going round in my head since I got off the bus and "
    "I cannot get rid of it. {question} Feel free to take your time, though an answer today would make me very happy indeed.",
    "I am learning English and a little general knowledge with an old book that has lost several of its pages, including, of "
    "course, those with the solutions. In the exercise of chapter nine I found this one. {question} Many thanks, and "
    "greetings from a rainy place.",
    "My colleague, who always knows everything better, claimed during the coffee break that nobody remembers such things any "
    "more since there are phones. I would like to prove him wrong tomorrow. {question} Please do not tell him that I asked, "
    "should you ever meet.",
)  # fmt: skip

#: Families that are asked together of one thing, with the ways to do so; the last is held out.
TWO_PART: dict[tuple[str, str], tuple[str, ...]] = {
    ("capital", "continent"): ("What is the capital of {country}, and on which continent is it?",
                               "{country}: which continent is it on, and which city is its capital?"),
    ("capital", "currency"): ("What is the capital of {country}, and what is its currency?",
                              "Which money does {country} use, and what is its capital city?"),
    ("capital", "language"): ("What is the capital of {country}, and which language is official there?",
                              "Which official language and which capital does {country} have?"),
    ("symbol", "atomic_number"): ("What is the chemical symbol of {element}, and its atomic number?",
                                  "Which number and which symbol does {element} have in the periodic table?"),
    ("state_capital", "state_code"): ("What is the capital of {state}, and its two-letter postal code?",
                                      "How is {state} abbreviated, and which city is its capital?"),
}  # fmt: skip
