"""Texts on which tokenizers part: made from a seed, each of a stated kind."""

import random
import unicodedata

BLANK = "\u2581"  # SentencePiece's own sign for a blank

# kind -> texts that are tried as they are, and parts that mixed texts are drawn from.
KINDS = {
    "empty and blank": ["", " ", "   ", "\t", "\n", "\r\n", " \t\r\n ", "\u3000", "\u00a0", "\u2003\u2009", "\u200b"],
    "lines and tabs": ["one\r\ntwo", "one\rtwo", "one\ntwo\n", "\tone\ttwo", "one\vtwo\ftwo", "a\u0085b\u2028c\u2029d"],
    "nul": ["\0", "\0\0", "\0one", "one\0", "one\0two", "one\0\0two", "a\0b\0c", "很\0好", "one \0 two"],
    "controls": ["a\x01b", "\x7f", "a\x1b[0mb", "\x02\x03", "a\x80b", "\x9f", "".join(map(chr, range(1, 32)))],
    "composed": ["é", "Åström", "ñandú", "각", "ệ", "Ω", "が", "\u0958", "שׁ"],
    "combining": ["e\u0301", "a\u0300\u0323\u0302", "\u0301", "\u0301\u0301a", "x" + "\u0336" * 20, "u\u0308\u0301"],
    "case": ["İstanbul", "ıspanak", "I\u0307", "i\u0307", "ß", "ẞ", "STRASSE", "ΣΊΣΥΦΟΣ ς", "ǅ", "Ⅷ ⅷ", "ŉ", "ﬀI"],
    "ligatures": ["ﬁlm", "oﬀice", "ﬃ", "ﬅ", "Ĳ", "ǆ", "ﷺ", "㌀", "㎏", "½ ¾", "x²", "№", "™", "…", "⑨"],
    "full width": ["Ｆｕｌｌ　ｗｉｄｔｈ", "ﾊﾝｶｸ", "ｶﾞ", "！？", "１２３", "￥", "（好）"],
    "emoji": [
        "\U0001f600", "\U0001f44d\U0001f3fd", "\U0001f469\u200d\U0001f4bb", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "1\ufe0f\u20e3", "\U0001f3f4\U000e0067\U000e007f",
    ],
    "zero width": ["a\u200bb", "a\u200cb", "a\u200db", "\ufeffa", "a\ufeffb", "a\u2060b", "a\u00adb", "\u180e",
                   "می\u200cخواهم"],
    "bidi": ["\u200eabc", "\u200fשלום", "\u202aabc\u202c", "\u202eabc", "\u2066a\u2067b\u2068c\u2069", "\u061cا"],
    "surrogates": ["\ud800", "a\udc00b", "\udfff\ud800", "\ud83d", "好\ud83d!", "\udcff\udcfe"],
    "not characters": ["\ufffd", "a\ufffdb", "\ufffe", "\uffff", "\U0001fffe", "\U0010ffff", "\ue000",
                       "a\uf8ffb", "\U000f0000"],
    "blank sign": [BLANK, f"a{BLANK}b", f"{BLANK}{BLANK}", f"{BLANK}a", f"a{BLANK}", f" {BLANK} ",
                   "\u2580\u2585\u2588", "_a_"],
    "symbols": [
        "<unk>", "<s>", "</s>", "<pad>", "<mask>", "<0x41>", "<0xFF>", "a<mask>b", " <mask> ", "<unk><unk>", "⁇",
        "[URL]", "a[URL]b", "@user @user", "<0x00>", "<MASK>", "<sep>", " ⁇ ",
    ],
    "runs": [c * n for c in "?.!*-=a0 很\u0301\U0001f600" for n in (2, 3, 4, 5, 7, 16, 33)],
    "scripts": [
        "这部电影非常好看，推荐！", "我不喜欢这个故事。", "繁體中文電影", "หนังเรื่องนี้ดีมาก", "น้ำ",
        "هذا فيلم رائع", "مُحَمَّد", "ـــــ",
        "यह फ़िल्म अच्छी है", "क्षत्रिय", "이 영화는 정말 좋다", "\u1112\u1161\u11ab",
        "映画は面白い", "Фильм хороший", "ሰላም", "ཨོཾ", "𝓯𝓲𝓵𝓶", "𠮷野家",
    ],
    "words": ["the film was good", "naïve café – 100 %", "Noooooo!!!!!!!!!", "don’t “quote”",
              "C:\\dir\\file", "a" * 300],
}

# 100,000 characters; SentencePiece's time grows with the text alone.
LONG = ["good film " * 10_000, "电影" * 50_000, "?" * 100_000]


def odd_texts(count, seed=0):
    """Returns `count` different str: all of `KINDS`, their other normal forms, `LONG`, and mixtures of their parts."""
    rng = random.Random(seed)
    parts = [text for texts in KINDS.values() for text in texts]
    forms = [unicodedata.normalize(form, text) for text in parts for form in ("NFC", "NFD", "NFKC", "NFKD")]
    found = dict.fromkeys([*parts, *forms, *LONG])
    while len(found) < count:
        pieces = rng.choices(parts, k=rng.randint(1, 6))
        pieces += ["".join(map(_any_character, [rng] * rng.randint(0, 4)))]
        rng.shuffle(pieces)
        found[rng.choice(["", "", " ", "  "]).join(pieces)] = None
    return list(found)[:count]


def _any_character(rng):
    plane = rng.choice([0x7F, 0x7FF, 0xFFFF, 0x10FFFF])
    return chr(rng.randint(0, plane))
