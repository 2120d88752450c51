"""Paths -> documents: text, Markdown, HTML, PDF, JSON lines, standard input.

`scan` looks at every file once and keeps nothing of it in memory; each `Source` that it finds is loaded when its turn
comes. What cannot be read is listed and the rest goes on.

A new file type is one function from bytes to `Parsed`, registered with `@reader(".suffix")`.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from html.parser import HTMLParser
from io import BytesIO
from typing import Any, TypeAlias, TypeVar

from lazyrag.errors import InputError, LazyRAGError, LoadError
from lazyrag.optional import need
from lazyrag.registry import Registry
from lazyrag.types import EMPTY, Document, Metadata, MetadataValue

MAX_BYTES = 100 * 2**20
SHOWN = 3  # reasons, where there may be many
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """Something that will become one document.

    Attributes:
        id: the document's: a file's absolute path, `path#key` for a record of it.
        sha256: of the bytes it is made from, as they were when it was found.
        num_bytes: how many they are.
        mtime: of its file, seconds since the epoch.
        load: reads it. Raises LoadError if it cannot be read or has changed since, MissingExtraError if the package
            that reads its format is not installed.
    """

    id: str
    sha256: str
    num_bytes: int
    mtime: float | None
    load: Callable[[], Document] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that could not be used, and why. `source` is its path, `path:line` or id."""

    source: str
    error: LazyRAGError


@dataclass(slots=True)
class Scan:
    """What was found under some paths.

    Attributes:
        failed: what cannot be read.
        skipped: files in folders that were passed over: hidden ones (for a hidden folder, the folder) and those of
            unknown type. Like `failed`, they say nothing about what was loaded from there before.
        roots: the files and folders that were named; a pattern is no root.
    """

    sources: list[Source] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    _unknown: set[str] = field(default_factory=set)

    def misses(self, id: str) -> bool:
        """Whether a document that was loaded before would have been found now, if it still existed."""
        above = {id, *(id[: match.start()] or "/" for match in re.finditer("[/#]", id))}
        return not above.isdisjoint(self.roots) and above.isdisjoint(self._unknown)

    @property
    def is_empty(self) -> bool:
        """Whether paths were given, and hold nothing that can be loaded."""
        return not self.sources and bool(self.roots or self.failed)

    def nothing(self) -> InputError:
        """What to say of that."""
        reasons = [f"{failure.error.what} {failure.error.why}" for failure in self.failed[:SHOWN]]
        more = len(self.failed) - len(reasons)
        reasons += [f"{more} more like that."] if more else []
        known = ", ".join(sorted(FORMATS))
        return InputError(
            "There is nothing to ingest:",
            why=" ".join(reasons) or f"of the files there, none is of a known type ({known}).",
            fix="" if reasons else "Name a file to have it read as text, whatever its type.",
        )

    def fail(self, path: str, why: str, *, place: str = "") -> None:
        """List a file or folder, or one `place` in a file."""
        self._unknown.add(path)
        source = f"{path}{place}"
        self.failed.append(Failure(source, LoadError(f"{source} cannot be read:", why=why)))

    def skip(self, path: str) -> None:
        """List a file that is passed over."""
        self._unknown.add(path)
        self.skipped.append(path)


def scan(paths: Iterable[str | os.PathLike[str]], *, max_bytes: int = MAX_BYTES) -> Scan:
    """Find documents.

    Args:
        paths: files, folders, patterns such as "docs/**/*.md", or "-" for standard input. A file that is named is read
            whatever its name; in a folder, hidden files and files of unknown type are passed over. Links are followed;
            a file that is reached twice counts once.
        max_bytes: a larger file (or record of a .jsonl file) is not read.

    Raises:
        InputError: one path where a list is meant, an empty path, or something else that is no path.
    """
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise InputError("One path was given where a list of paths is meant.", fix="Pass a list: [path].")
    scanner = _Scanner(max_bytes)
    for path in [_path(path) for path in paths]:
        scanner.add(path)
    scanner.follow_links()
    return scanner.found


def load(paths: Iterable[str | os.PathLike[str]], *, max_bytes: int = MAX_BYTES) -> Iterator[Document | Failure]:
    """Every document under some paths, and what cannot be read; arguments as `scan`."""
    found = scan(paths, max_bytes=max_bytes)
    yield from found.failed
    for source in found.sources:
        try:
            yield source.load()
        except LazyRAGError as error:
            yield Failure(source.id, error)


# ---------------------------------------------------------------- finding files


class _Scanner:
    """Walks over paths and fills `found`."""

    def __init__(self, max_bytes: int) -> None:
        self.found = Scan()
        self._max_bytes = max_bytes
        self._seen: set[str] = set()  # real paths
        self._links: list[str] = []

    def add(self, path: str) -> None:
        """Take one argument of `scan`."""
        if path == "-":
            self._stdin()
            return
        path = os.path.abspath(os.path.expanduser(path))
        if os.path.lexists(path):
            self.found.roots.append(_name(path))
            self._any(path)
        elif glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                self.found.fail(_name(path), "the pattern matches no file.")
            for match in matches:
                self._any(match)
        else:
            self.found.fail(_name(path), "it does not exist.")

    def follow_links(self) -> None:
        """Look at the links met on the way. They come last: a file is known by its own path where it has one."""
        while self._links:
            links, self._links = self._links, []
            for path in links:
                if os.path.isdir(path):
                    self._folder(path)
                else:
                    self._file(path, os.path.realpath(path), named=False)

    def _any(self, path: str) -> None:
        if os.path.isdir(path):
            self._folder(path)
        else:
            self._file(path, os.path.realpath(path), named=True)

    def _folder(self, top: str) -> None:
        stack = [(top, os.path.realpath(top))]
        while stack:
            folder, real = stack.pop()
            if real in self._seen:  # also what ends a loop of links
                continue
            self._seen.add(real)
            try:
                with os.scandir(folder) as listing:
                    entries = sorted(listing, key=lambda entry: entry.name)
            except OSError as error:
                self.found.fail(_name(folder), _reason(error))
                continue
            folders = []
            for entry in entries:
                if entry.name.startswith("."):
                    self.found.skip(_name(entry.path))
                elif entry.is_symlink():
                    self._links.append(entry.path)
                elif entry.is_dir():
                    folders.append((entry.path, os.path.join(real, entry.name)))
                else:
                    self._file(entry.path, os.path.join(real, entry.name), named=False)
            stack += reversed(folders)

    def _file(self, path: str, real: str, *, named: bool) -> None:
        if real in self._seen:
            return
        self._seen.add(real)
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in FORMATS and not named:
            self.found.skip(_name(path))
            return
        find = FORMATS.get(suffix if suffix in FORMATS else ".txt")
        try:
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                find(path, self._max_bytes, self.found)
            else:
                self.found.fail(_name(path), "it is no regular file.")
        except OSError as error:
            self.found.fail(_name(path), _reason(error))

    def _stdin(self) -> None:
        data = sys.stdin.buffer.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            self.found.fail("-", _too_large(self._max_bytes))
            return
        digest = sha256(data).hexdigest()
        # Standard input has no name that would last, so what it says is its identity.
        id = f"stdin:{digest[:16]}"
        load = partial(_document, id, lambda: data, _text)
        self.found.sources.append(Source(id, digest, len(data), None, load))


def _path(path: object) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise InputError(f"A path is text or a Path, not {type(path).__name__}.")
    if not text:
        raise InputError("A path is empty.", fix="For the current folder, type a dot.")
    return text


def _name(path: str) -> str:
    """The path as valid Unicode: what is none in a file name is written as hexadecimal escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}."


def _too_large(max_bytes: int) -> str:
    return f"it is larger than {max_bytes / 2**20:g} MiB."


# ---------------------------------------------------------------- file types


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reader makes of a file; attributes as in `Document`."""

    text: str
    title: str | None = None
    metadata: Metadata = field(default_factory=lambda: EMPTY)
    pages: tuple[int, ...] = ()


class Unreadable(ValueError):
    """What a reader raises: the reason, as the end of "FILE cannot be read: ...". It holds no text of the document."""


Reader: TypeAlias = Callable[[bytes], Parsed]
Finder: TypeAlias = Callable[[str, int, Scan], None]
"""(path, max_bytes, scan): appends the sources in a file to the scan. Raises OSError if it cannot be read."""

FORMATS: Registry[Finder] = Registry("file type")


def reader(*suffixes: str) -> Callable[[Reader], Reader]:
    """Register a function that reads files with these suffixes (".md"), each of which is one document.

    It is given the file's bytes, imports what it needs inside itself, and raises Unreadable (or MissingExtraError).
    """

    def add(read: Reader) -> Reader:
        FORMATS.register(*suffixes)(partial(_find_file, read))
        return read

    return add


def _find_file(read: Reader, path: str, max_bytes: int, found: Scan) -> None:
    digest, num_bytes = sha256(), 0
    with open(path, "rb") as file:
        mtime = os.fstat(file.fileno()).st_mtime
        while block := file.read(2**20):
            digest.update(block)
            num_bytes += len(block)
            if num_bytes > max_bytes:
                found.fail(_name(path), _too_large(max_bytes))
                return
    id = _name(path)
    load = partial(_document, id, partial(_read, path, 0, num_bytes, digest.hexdigest(), whole=True), read)
    found.sources.append(Source(id, digest.hexdigest(), num_bytes, mtime, load))


@FORMATS.register(".jsonl", ".ndjson")
def _find_records(path: str, max_bytes: int, found: Scan) -> None:
    """One JSON object a line: `text`; optional `id`, `title`, `source` (or `url`); the rest is metadata."""
    ids = set()
    with open(path, "rb") as file:
        mtime = os.fstat(file.fileno()).st_mtime
        start = 0
        for number, line in enumerate(iter(partial(file.readline, max_bytes + 1), b""), 1):
            size = len(line)
            if size > max_bytes and not line.endswith(b"\n"):
                found.fail(_name(path), _too_large(max_bytes), place=f":{number}")
                while rest := file.readline(2**20):
                    size += len(rest)
                    if rest.endswith(b"\n"):
                        break
            elif record := line.rstrip():  # without the line end, which the last line may lack
                digest = sha256(record).hexdigest()
                read = partial(_read, path, start, len(record), digest)
                try:
                    id = _valid(f"{_name(path)}#{_record(record).get('id', number)}")
                    if id in ids:
                        raise Unreadable("an earlier line has the same id.")
                except Unreadable as error:
                    found.fail(_name(path), str(error), place=f":{number}")
                else:
                    ids.add(id)
                    found.sources.append(
                        Source(id, digest, len(record), mtime, partial(_document, id, read, _read_record))
                    )
            start += size


def _read(path: str, start: int, size: int, digest: str, *, whole: bool = False) -> bytes:
    """The bytes that were found there.

    Raises:
        Unreadable: they are others now.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(size + whole)  # one byte more shows a file that has grown
    if sha256(data).hexdigest() != digest:
        raise Unreadable("it changed while it was being ingested. Run the command again.")
    return data


def _document(id: str, read_bytes: Callable[[], bytes], read: Reader) -> Document:
    """Read and parse.

    Raises:
        LoadError: either is impossible.
    """
    try:
        parsed = read(read_bytes())
    except (OSError, Unreadable) as error:
        why = _reason(error) if isinstance(error, OSError) else str(error)
        raise LoadError(f"{id} cannot be read:", why=why) from error
    metadata = {_valid(name): _valid(value) for name, value in parsed.metadata.items()}
    source = metadata.pop("source", None) or id
    return Document(id, _valid(parsed.text), str(source), _valid(parsed.title), metadata, parsed.pages)


def _valid(text: T) -> T:
    """Lone surrogates, which broken PDF fonts and JSON escapes give, become U+FFFD one by one, so offsets stay."""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", text) if isinstance(text, str) else text  # type: ignore[return-value]


# ---------------------------------------------------------------- text


@reader(".txt", ".text", ".rst")
def _text(data: bytes) -> Parsed:
    text, encoding = decode(data)
    return Parsed(text, metadata={} if encoding == "utf-8" else {"encoding": encoding})


@reader(".md", ".markdown")
def _markdown(data: bytes) -> Parsed:
    parsed = _text(data)
    return replace(parsed, title=_first_heading(parsed.text))


def _first_heading(text: str) -> str | None:
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and (match := re.match(r"#{1,6}[ \t]+(.*?)[ \t]*#*$", line)):
            return match[1] or None
    return None


def decode(data: bytes, declared: str | None = None) -> tuple[str, str]:
    """Bytes -> text with Unix line ends, and the encoding that was used.

    A byte order mark decides; else UTF-8; else what the file itself declares; else cp1252, which Latin-1 text is in
    practice, if the result looks like text.

    Raises:
        Unreadable: the data are no text.
    """
    for encoding in _encodings(data, declared):
        try:
            text = data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        # In a file that is no UTF-8, a control character says that it is no text at all.
        if "\0" in text or (encoding == "cp1252" and re.search(r"[\x01-\x08\x0e-\x19\x1c-\x1f\x7f]", text)):
            break
        return text.replace("\r\n", "\n").replace("\r", "\n"), "utf-8" if encoding == "utf-8-sig" else encoding
    raise Unreadable("it is binary, or text in an encoding that was not recognised (save it as UTF-8).")


def _encodings(data: bytes, declared: str | None) -> list[str]:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ["utf-16"]
    if declared is None or declared.lower().startswith(("utf-16", "utf-32")):
        return ["utf-8-sig", "cp1252"]  # the declaration was found as ASCII, so those two would be wrong
    return ["utf-8-sig", declared, "cp1252"]


# ---------------------------------------------------------------- HTML

_UNSEEN = {"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "select"}
_PARAGRAPH = {"p", "pre", "blockquote", "ul", "ol", "dl", "table", "figure", "section", "article", "hr"}
_PARAGRAPH |= {"h1", "h2", "h3", "h4", "h5", "h6", "header", "footer", "main", "aside", "nav", "form"}
_LINE = {"li", "dt", "dd", "tr", "div", "br", "caption", "figcaption", "summary", "address", "body"}
_CELL = {"td", "th"}
_VOID = {"br", "hr"}


@reader(".html", ".htm", ".xhtml")
def _html(data: bytes) -> Parsed:
    declared = re.search(rb"<meta[^>]+charset\s*=\s*[\"']?([\w.:-]+)", data[:4096], re.IGNORECASE)
    text, encoding = decode(data, declared[1].decode() if declared else None)
    page = _HtmlText()
    page.feed(text)
    page.close()
    metadata: dict[str, MetadataValue] = {} if encoding == "utf-8" else {"encoding": encoding}
    return Parsed("".join(page.out).strip(), " ".join((page.title or page.heading).split()) or None, metadata)


class _HtmlText(HTMLParser):
    """The text that a reader sees, with its paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.title = self.heading = ""
        self._newlines = 0  # to be written before the next text
        self._space = False
        self._unseen: list[str] = []  # open elements whose content is not shown
        self._open = ""  # "title" or "h1" while the first of its kind is open
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag in _UNSEEN:
            self._unseen.append(tag)
        if self._unseen:
            return
        self._break(tag)
        if tag == "pre":
            self._pre += 1
        if (tag == "title" and not self.title) or (tag == "h1" and not self.heading):
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        if self._unseen:
            if tag == self._unseen[-1]:
                self._unseen.pop()
            return
        if tag not in _VOID:
            self._break(tag)
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if self._open == "title":
            self.title += data
            return
        if self._pre:
            self._write(data)
            return
        words = data.split(None)
        if self._open == "h1":
            self.heading += data
        self._space |= data[:1].isspace()
        if words:
            self._write(" ".join(words))
            self._space = data[-1].isspace()

    def _break(self, tag: str) -> None:
        if tag in _PARAGRAPH:
            self._newlines = 2
        elif tag in _LINE:
            self._newlines = max(self._newlines, 1)
        elif tag in _CELL:
            self._space = True

    def _write(self, text: str) -> None:
        if self._newlines:
            self.out.append("\n" * self._newlines)
        elif self._space:
            self.out.append(" ")
        self._newlines, self._space = 0, False
        self.out.append(text)


# ---------------------------------------------------------------- PDF


PLACEHOLDERS = ("untitled", "(anonymous)", "unspecified")
"""What programs write as the title of a PDF that was given none."""


@reader(".pdf")
def _pdf(data: bytes) -> Parsed:
    pypdf = need("pypdf", extra="pdf")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it quotes the file's bytes
    try:
        pdf = pypdf.PdfReader(BytesIO(data))
        locked = pdf.is_encrypted and not pdf.decrypt("")
        texts = [] if locked else [page.extract_text().replace("\0", "") for page in pdf.pages]
        title = None if locked else pdf.metadata and pdf.metadata.title
    except Exception as error:  # a broken PDF makes pypdf raise almost anything
        raise Unreadable(f"it is no PDF that pypdf can read ({type(error).__name__}).") from error
    if locked:
        raise Unreadable("it is protected by a password.")
    if not any(text.strip() for text in texts):
        raise Unreadable("it holds no text; a scan must go through text recognition (OCR) first.")
    pages, start = [], 0
    for text in texts:
        pages.append(start)
        start += len(text) + 2
    title = str(title or "").strip()
    named = title and title.lower() not in PLACEHOLDERS
    return Parsed("\n\n".join(texts), title if named else None, pages=tuple(pages))


# ---------------------------------------------------------------- JSON lines


def _record(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is no JSON ({type(error).__name__}).") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise Unreadable('it is no object with a string "text".')
    if not isinstance(record.get("id", ""), (str, int)):
        raise Unreadable('its "id" is neither a string nor a whole number.')
    return record


def _read_record(line: bytes) -> Parsed:
    record = dict(_record(line))
    text, title = record.pop("text"), record.pop("title", None)
    record.pop("id", None)
    if isinstance(url := record.get("url"), str):
        record.setdefault("source", url)
    metadata = {name: value if _is_scalar(value) else json.dumps(value) for name, value in record.items()}
    return Parsed(text, None if title is None else str(title), metadata)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
