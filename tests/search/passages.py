"""A few passages, and questions that share no word with them."""

from mempo_trl.search import Document


DOCUMENTS = [
    Document("cat", '"Pets"\nThe feline slept on the couch all afternoon.'),
    Document("bank", '"Economy"\nThe central bank raised interest rates again.'),
    Document("space", '"Orbit"\nAstronauts circled our planet in a capsule.'),
    Document("doctor", '"Clinic"\nThe physician prescribed antibiotics for the infection.'),
    Document("kitchen", '"Cooking"\nSimmer the onions in butter until they are golden.'),
    Document("rain", '"Weather"\nHeavy showers flooded several streets downtown.'),
    Document("odd", "lone \ud800 surrogate, \x00 and 東京\u2028"),
    Document("empty", ""),
]
# No word in common with the document, nor with its title.
PARAPHRASES = {
    "a kitty napping upon some sofa": "cat",
    "borrowing money became more expensive": "bank",
    "people travelling around earth aboard spaceships": "space",
    "medicine given by doctors to sick patients": "doctor",
    "recipe for frying vegetables": "kitchen",
    "storms put roads under water": "rain",
}
