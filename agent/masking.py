"""Takes what looks like personal data or a secret out of free text that is about to leave.

Names of processes, error texts of engines, stacks: text that somebody else wrote. Found are e-mail
addresses, bearer tokens and passwords in headers and URLs, API keys, telephone numbers and IP
addresses; what is found becomes a word in brackets. It errs on the side of masking, but numbers,
durations, hexadecimal ids and loopback addresses stay. Pure, and linear in the text's length.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

MAX_CHARS = 4096
CUT = "…"

# Possessive groups would need Python 3.11: each repetition below is bounded and begins where the
# one before cannot go on, so that no text makes the search go back far.
_EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_URL_SECRET = re.compile(r"(?<=://)[^\s/@:]{0,128}:[^\s/@]{1,256}@")
_BETWEEN = r"['\"]?[ \t]{0,4}[:=][ \t]{0,4}['\"]?"  # a name and its value
_MASKED = r"\[secret"
_NUMBER = r"\d{1,20}(?:\.\d{0,20})?(?!\w)"
# The scheme stays, what follows it does not.
_SCHEME = r"\w{1,20}[ \t]{1,4}"
_AUTHORIZATION = re.compile(
    rf"(authorization{_BETWEEN}(?!(?:{_SCHEME})?{_MASKED})(?:{_SCHEME})?)[^\s'\",;]{{1,4096}}",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer[ \t]{1,4})[\w.~+/=-]{8,4096}", re.IGNORECASE)
# A name that says it is a secret, then its value: header, JSON, environment variable. Tokens are
# what a language model makes: a number after that word is no secret.
_NAMED = re.compile(
    r"((?:(?:api|access|secret|private|auth)[_-]?(?:key|token)|passw(?:or)?d|passphrase|secret"
    rf"|cookie|(?<![a-z])token(?!{_BETWEEN}{_NUMBER})){_BETWEEN})"
    rf"(?!{_MASKED})[^\s'\",;&]{{1,4096}}",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(--[\w-]{0,32}(?:key|token|secret|password|passphrase)[ \t]{1,4})"
    rf"(?!{_MASKED})[^\s'\",;]{{1,4096}}",
    re.IGNORECASE,
)
# The same in a command line, where a value is all of its word, whatever it is made of.
_SECRET_WORD = r"(?:key|token|secret|passw(?:or)?d|passphrase|authorization|cookie)"
_WORD_WITH_VALUE = re.compile(rf"(-{{0,2}}[\w.-]{{0,64}}{_SECRET_WORD}[:=]).+", re.I | re.S)
_WORD_BEFORE_VALUE = re.compile(rf"--[\w.-]{{0,64}}{_SECRET_WORD}", re.I)
# The beginnings that issuers gave their keys so that they can be found, and JSON Web Tokens.
_KEY = re.compile(
    r"\b(?:(?:sk|pk|rk|hf|gsk|xai|nvapi|glpat|pplx|r8)[-_][\w-]{12,512}"
    r"|gh[pousr]_\w{20,255}|github_pat_\w{20,255}|xox[abprs]-[\w-]{10,255}"
    r"|A(?:KIA|SIA)[0-9A-Z]{16}\b|AIza[\w-]{30,64}"
    r"|eyJ[\w-]{8,2048}\.[\w-]{8,2048}(?:\.[\w-]{0,2048})?)"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]{2,39}(?:%\w{1,16})?(?![\w:])")
# International with a plus, or groups of digits with separators as people write them.
_PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
    r"|\(\d{3}\)[ .-]?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w]|[.-]\d)"
)


def mask(text: str) -> str:
    """At most MAX_CHARS of it, with what was found replaced."""
    if len(text) > MAX_CHARS:
        text = _cut(text)
    text = _URL_SECRET.sub("[secret]@", text)
    for names_it in (_AUTHORIZATION, _BEARER, _NAMED, _OPTION):
        text = names_it.sub(r"\1[secret]", text)
    text = _KEY.sub("[secret]", text)
    if "@" in text:
        text = _EMAIL.sub("[email]", text)
    text = _IPV4.sub(_address, text)
    if ":" in text:
        text = _IPV6.sub(_address, text)
    text = _PHONE.sub("[phone]", text)
    return text if len(text) <= MAX_CHARS else _cut(text)


def mask_words(words: Iterable[str]) -> list[str]:
    """The same of a command line. A secret that holds blanks, commas, quotes or slashes is masked
    as far as its word goes; at most some MAX_CHARS of all are looked at."""
    masked: list[str] = []
    left, before = MAX_CHARS, ""
    for word in words:
        if left <= 0:
            masked.append(CUT)
            break
        if _WORD_BEFORE_VALUE.fullmatch(before) and not word.startswith("--"):
            masked.append("[secret]")
        elif (named := _WORD_WITH_VALUE.fullmatch(word)) is not None:
            masked.append(f"{named[1]}[secret]")
        else:
            masked.append(mask(word))
        left -= len(word) + 1
        before = word
    return masked


def mask_command(words: Iterable[str]) -> str:
    """As one text; once more over all of it, since some secrets are told by the word before."""
    return mask(" ".join(mask_words(words)))


def _cut(text: str) -> str:
    """At a space where there is one near: half a secret might not look like one."""
    end = MAX_CHARS - len(CUT)
    space = text.rfind(" ", end - 512, end)
    return text[: space if space > 0 else end] + CUT


def _address(found: re.Match[str]) -> str:
    text = found[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text  # a time of day, a version, a C++ name
    if address.is_loopback or address.is_unspecified:
        return text
    return "[ip]"
