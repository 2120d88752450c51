import io
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from lazyrag.errors import InputError, LoadError, MissingExtraError
from lazyrag.loaders import FORMATS as formats
from lazyrag.loaders import Failure, Parsed, Scan, Unreadable, decode, load, reader, scan
from lazyrag.types import Document


@pytest.fixture
def folder(tmp_path):
    """Writes files: folder({"a/b.txt": "text" or bytes})."""

    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def only(path, **options):
    """The one document under a path."""
    (document,) = load([path], **options)
    assert isinstance(document, Document), document
    return document


def why(path, **options):
    """Why the one file under a path cannot be read."""
    (failure,) = load([path], **options)
    assert isinstance(failure, Failure), failure
    assert isinstance(failure.error, LoadError)
    return str(failure.error)


def names(found):
    return [os.path.basename(source.id) for source in found.sources]


# ---------------------------------------------------------------- finding files


def test_a_folder_is_walked_in_order_and_unknown_and_hidden_files_are_passed_over(folder):
    root = folder(
        {"b.txt": "b", "a.md": "a", "sub/c.html": "c", "image.png": b"\x89PNG", ".hidden.txt": "h", ".git/x.txt": "x"}
    )
    found = scan([root])
    assert names(found) == ["a.md", "b.txt", "c.html"]
    assert [os.path.relpath(path, root) for path in found.skipped] == [".git", ".hidden.txt", "image.png"]
    assert found.failed == []
    source = found.sources[0]
    assert source.id == str(root / "a.md")
    assert source.num_bytes == 1
    assert source.mtime == (root / "a.md").stat().st_mtime


def test_a_file_that_is_named_is_read_whatever_its_name(folder):
    root = folder({"LICENSE": "text", ".hidden": "text", "code.py": "x = 1"})
    assert [d.text for d in load([root / "LICENSE", root / ".hidden", root / "code.py"])] == ["text", "text", "x = 1"]


def test_patterns_find_files(folder):
    root = folder({"a.md": "a", "b.txt": "b", "sub/c.md": "c"})
    assert names(scan([f"{root}/*.md"])) == ["a.md"]
    assert names(scan([f"{root}/**/*.md"])) == ["a.md", "c.md"]
    assert "matches no file" in str(scan([f"{root}/*.rst"]).failed[0].error)


def test_a_path_that_does_not_exist_is_listed_and_the_rest_goes_on(folder):
    root = folder({"a.md": "a"})
    found = scan([root / "nothing", root / "a.md"])
    assert names(found) == ["a.md"]
    assert str(found.failed[0].error) == f"{root / 'nothing'} cannot be read: it does not exist."


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("docs", "list of paths"),
        (b"docs", "list of paths"),
        (Path("docs"), "list of paths"),
        ([""], "path is empty"),
        (["docs", b"docs"], "not bytes"),
        ([None], "not NoneType"),
    ],
    ids=str,
)
def test_what_is_no_list_of_paths_is_refused(paths, message):
    with pytest.raises(InputError, match=message):
        scan(paths)


def test_relative_paths_and_the_home_folder_give_absolute_ids(folder, monkeypatch):
    root = folder({"a.md": "a"})
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(root))
    assert scan(["a.md"]).sources[0].id == scan(["~/a.md"]).sources[0].id == str(root / "a.md")


def test_a_file_that_is_reached_twice_counts_once_under_its_own_path(folder):
    root = folder({"real/a.md": "a", "b.md": "b"})
    (root / "alias").symlink_to("real")
    (root / "a-link.md").symlink_to("real/a.md")
    assert [source.id for source in scan([root, root / "b.md", f"{root}/*.md"]).sources] == [
        str(root / "b.md"),
        str(root / "real/a.md"),
    ]


def test_links_out_of_the_folder_are_followed(folder):
    root = folder({"in/a.md": "a", "out/b.md": "b", "c.md": "c"})
    (root / "in" / "more").symlink_to(root / "out")
    (root / "in" / "c-link.md").symlink_to(root / "c.md")
    assert [source.id for source in scan([root / "in"]).sources] == [
        str(root / "in/a.md"),
        str(root / "in/c-link.md"),
        str(root / "in/more/b.md"),
    ]


@pytest.mark.timeout(20)
def test_loops_of_links_end(folder):
    root = folder({"a/x.md": "x"})
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self.md").symlink_to("self.md")
    (root / "a" / "dangling.md").symlink_to("nothing")
    found = scan([root])
    assert names(found) == ["x.md"]
    assert sorted(os.path.basename(failure.source) for failure in found.failed) == ["dangling.md", "self.md"]


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_not_waited_for(folder):
    root = folder({"a.md": "a"})
    os.mkfifo(root / "pipe.txt")
    found = scan([root])
    assert names(found) == ["a.md"]
    assert "no regular file" in str(found.failed[0].error)


def test_an_unreadable_folder_is_listed(folder, monkeypatch):
    root = folder({"a.md": "a", "locked/b.md": "b"})
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    found = scan([root])
    assert names(found) == ["a.md"]
    assert str(found.failed[0].error) == f"{root / 'locked'} cannot be read: Permission denied."


def test_a_file_name_that_is_no_unicode_gives_an_id_that_is(folder):
    root = folder({})
    with open(os.fsencode(root) + b"/caf\xe9.md", "wb") as file:
        file.write(b"text")
    document = only(root)
    assert document.id == f"{root}/caf\\xe9.md"
    assert document.text == "text"


def test_a_file_larger_than_the_limit_is_not_read(folder):
    root = folder({"a.md": "x" * 100, "b.md": "y" * 101})
    found = scan([root], max_bytes=100)
    assert names(found) == ["a.md"]
    assert "larger than" in str(found.failed[0].error)


def test_standard_input_is_named_by_what_it_says(monkeypatch):
    def pipe(data):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    pipe(b"some text")
    document = only("-")
    assert document.text == "some text"
    assert document.id.startswith("stdin:")
    pipe(b"other text")
    assert only("-").id != document.id
    pipe(b"some text")
    assert only("-").id == document.id
    pipe(b"x" * 11)
    assert "larger than" in why("-", max_bytes=10)


def test_a_file_that_changes_between_scan_and_load_is_a_failure(folder):
    root = folder({"a.md": "before", "b.jsonl": '{"text": "before"}\n'})
    found = scan([root])
    (root / "a.md").write_text("before, and more")
    (root / "b.jsonl").write_text('{"text": "after!"}\n')
    for source in found.sources:
        with pytest.raises(LoadError, match=r"changed while it was being ingested\. Run the command again\."):
            source.load()
    (root / "a.md").unlink()
    with pytest.raises(LoadError, match="No such file"):
        found.sources[0].load()


# ---------------------------------------------------------------- which documents are missing


def test_only_documents_below_a_named_file_or_folder_can_be_missing(folder):
    root = folder({"docs/a.md": "a", "records.jsonl": "", "docs2/b.md": "b"})
    found = scan([root / "docs", root / "records.jsonl", f"{root}/docs2/*.md"])
    assert found.roots == [str(root / "docs"), str(root / "records.jsonl")]
    assert found.misses(f"{root}/docs/gone.md")
    assert found.misses(f"{root}/docs/sub/gone.jsonl#7")
    assert found.misses(f"{root}/records.jsonl#old")
    assert not found.misses(f"{root}/docs2/gone.md")  # a pattern is no root
    assert not found.misses(f"{root}/docs-of-others/gone.md")
    assert not found.misses("https://example.org/page")
    assert Scan(roots=["/"]).misses("/anything/at all")


def test_what_could_not_be_looked_at_is_never_missing(folder):
    root = folder({"bad.jsonl": "no json\n", ".hidden/x.md": "x", "note.weird": "n"})
    found = scan([root, root / "nothing"])
    assert len(found.failed) == 2
    for id in ("bad.jsonl#1", ".hidden/x.md", "note.weird", "nothing/a.md"):
        assert not found.misses(f"{root}/{id}")
    assert found.misses(f"{root}/gone.md")


# ---------------------------------------------------------------- text


def test_text_is_decoded_and_its_line_ends_made_unix(folder):
    root = folder({"a.txt": "é\r\nb\rc\n".encode()})
    document = only(root)
    assert document.text == "é\nb\nc\n"
    assert (document.source, document.title, document.metadata, document.pages) == (document.id, None, {}, ())


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        (b"\xef\xbb\xbfabc", "abc", "utf-8"),
        ("äö".encode("utf-16"), "äö", "utf-16"),
        (b"\xfe\xff\x00a", "a", "utf-16"),
        ("naïve “quotes”".encode("cp1252"), "naïve “quotes”", "cp1252"),
        (b"", "", "utf-8"),
    ],
    ids=["utf-8 with a mark", "utf-16", "utf-16 big endian", "cp1252", "empty"],
)
def test_encodings_are_recognised(data, text, encoding):
    assert decode(data) == (text, encoding)


def test_a_guessed_encoding_is_noted(folder):
    assert only(folder({"a.txt": "naïve".encode("latin-1")})).metadata == {"encoding": "cp1252"}


@pytest.mark.parametrize(
    "data",
    [
        b"\x7fELF\x01\x00\x00",
        b"text with a \0 in it",
        b"\xff\xd8\xff\xe0\x10JFIF",
        b"\xff\xfea",
        bytes(range(128, 256)),
    ],
    ids=["program", "nul", "picture", "half a utf-16", "undefined"],
)
def test_binary_files_are_refused_with_the_reason(folder, data):
    assert "it is binary, or text in an encoding" in why(folder({"a.txt": data}) / "a.txt")


def test_markdown_is_kept_as_it_is_and_its_first_heading_is_the_title(folder):
    text = "```sh\n# a comment\n```\nIntro.\n\n## The *title* ##\n\ntext\n"
    document = only(folder({"a.md": text}))
    assert document.text == text
    assert document.title == "The *title*"
    assert only(folder({"a.md": "#hashtag, no heading"})).title is None


# ---------------------------------------------------------------- HTML


def html(folder, body):
    return only(folder({"a.html": body}))


def test_html_becomes_what_a_reader_sees(folder):
    document = html(
        folder,
        """<!DOCTYPE html><html><head><title> A  page </title><style>p {color: red}</style>
        <script>if (a < b) { document.write("<p>no</p>") }</script></head>
        <body><h1>Head<em>ing</em></h1>
        <p>First   paragraph,\n with <b>bold</b> and <a href=x>a link</a>.</p><p>Second &amp; last&hellip;</p>
        <ul><li>one<li>two</ul>
        <table><tr><th>k</th><th>v</th></tr><tr><td>a</td><td>1</td></tr></table>
        <pre>  keep
    this</pre>
        line<br>break <!-- comment --> <noscript>no</noscript><svg><title>no</title></svg>end</body></html>""",
    )
    assert document.title == "A page"
    assert document.text == (
        "Heading\n\nFirst paragraph, with bold and a link.\n\nSecond & last…\n\none\ntwo\n\nk v\na 1\n\n"
        "  keep\n    this\n\nline\nbreak end"
    )


def test_html_without_a_title_is_named_by_its_heading(folder):
    assert html(folder, "<h1>The\n  name</h1><h1>Other</h1>text").title == "The name"
    assert html(folder, "no markup at all").title is None


def test_html_declares_its_encoding_and_utf_8_needs_no_declaration(folder):
    latin2 = '<meta charset="iso-8859-2"><p>Łódź'.encode("iso-8859-2")
    document = html(folder, latin2)
    assert document.text == "Łódź"
    assert document.metadata == {"encoding": "iso-8859-2"}
    assert html(folder, "<meta charset=latin-1><p>Łódź".encode()).text == "Łódź"
    assert html(folder, "<meta charset=utf-16><p>é".encode("cp1252")).text == "é"
    assert html(folder, "<meta charset=nonsense><p>é".encode("cp1252")).text == "é"


@pytest.mark.parametrize(
    "page", ["<p>a<script>never closed", "<div>" * 5000 + "a", "a</p></p></pre>", "<p>a<![x", "<b>a<"]
)
def test_broken_html_is_read_as_far_as_it_goes(folder, page):
    assert html(folder, page).text.startswith("a")


# ---------------------------------------------------------------- PDF


def pdf(*pages, encrypt=None, title=None):
    from reportlab.lib.pdfencrypt import StandardEncryption
    from reportlab.pdfgen.canvas import Canvas

    out = io.BytesIO()
    canvas = Canvas(out, encrypt=StandardEncryption(encrypt, ownerPassword="owner") if encrypt is not None else None)
    if title:
        canvas.setTitle(title)
    for lines in pages:
        for i, line in enumerate(lines):
            canvas.drawString(72, 720 - 14 * i, line)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


@pytest.mark.parametrize("title", [None, "untitled", "Untitled"])
def test_a_pdf_without_a_title_has_none_whatever_its_program_writes(folder, title):
    assert only(folder({"a.pdf": pdf(["Text."], title=title)})).title is None


def test_a_pdf_knows_where_its_pages_begin(folder):
    document = only(folder({"a.pdf": pdf(["First page.", "Second line."], [], ["Third page."], title="A book")}))
    assert document.title == "A book"
    assert len(document.pages) == 3
    bounds = [*document.pages, len(document.text)]
    texts = [document.text[start:end].strip() for start, end in pairwise(bounds)]
    assert [text.split("\n") for text in texts] == [["First page.", "Second line."], [""], ["Third page."]]


def test_a_pdf_without_text_or_with_a_password_says_so(folder):
    assert "text recognition (OCR)" in why(folder({"a.pdf": pdf([])}))
    assert "protected by a password" in why(folder({"a.pdf": pdf(["x"], encrypt="secret")}))
    assert only(folder({"a.pdf": pdf(["only the owner has one"], encrypt="")})).text.strip() == "only the owner has one"


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5])
def test_a_broken_pdf_is_a_failure_that_tells_no_contents(folder, keep):
    whole = pdf(["Confidential."])
    reason = why(folder({"a.pdf": whole[: int(len(whole) * keep)]}))
    assert "no PDF that pypdf can read" in reason or "no text" in reason
    assert "Confidential" not in reason


def test_without_pypdf_only_pdfs_fail(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    failure, document = sorted(
        load([folder({"a.pdf": pdf(["x"]), "b.md": "b"})]), key=lambda r: isinstance(r, Document)
    )
    assert document.text == "b"
    assert isinstance(failure.error, MissingExtraError)
    assert "lazyrag[pdf]" in str(failure.error)


# ---------------------------------------------------------------- JSON lines


def jsonl(*records, end="\n"):
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + end


def test_each_line_is_a_document(folder):
    first = {"id": "k1", "text": "one", "title": "T", "url": "https://x", "year": 2020, "tags": ["a"], "none": None}
    root = folder({"a.jsonl": "\ufeff" + jsonl(first, "", {"id": 7, "text": "two\r\n"}, {"text": "three"}, end="")})
    documents = list(load([root]))
    path = root / "a.jsonl"
    assert [d.id for d in documents] == [f"{path}#k1", f"{path}#7", f"{path}#4"]
    assert [d.text for d in documents] == ["one", "two\r\n", "three"]
    assert (documents[0].title, documents[0].source) == ("T", "https://x")
    assert documents[0].metadata == {"url": "https://x", "year": 2020, "tags": '["a"]', "none": None}
    assert documents[1].source == documents[1].id


def test_a_bad_line_is_listed_by_its_number_and_the_rest_goes_on(folder):
    big = {"text": "x" * 200}
    lines = [{"text": "ok"}, "{broken", ["no object"], {"text": 1}, big, {"id": [1], "text": "x"}, {"text": "last"}]
    root = folder({"a.jsonl": jsonl(*lines, {"id": 7, "text": "twice"}, end="")})
    found = scan([root], max_bytes=100)
    assert [source.load().text for source in found.sources] == ["ok", "last"]
    assert [failure.source.rpartition(":")[2] for failure in found.failed] == ["2", "3", "4", "5", "6", "8"]
    reasons = " ".join(str(failure.error) for failure in found.failed)
    for reason in ("no JSON", 'string "text"', "larger than", "whole number", "same id"):
        assert reason in reasons
    assert "broken" not in reasons


def test_a_record_keeps_its_digest_when_lines_are_added_around_it(folder):
    record = {"id": "k", "text": "same"}

    def digest():
        return {source.id: source.sha256 for source in scan([tmp]).sources}[f"{tmp}/a.jsonl#k"]

    tmp = folder({"a.jsonl": jsonl(record, end="")})
    before = digest()
    folder({"a.jsonl": jsonl({"id": "new", "text": "x"}, record, {"id": "newer", "text": "y"})})
    assert digest() == before


def test_lone_surrogates_are_replaced_where_they_stand(folder):
    root = folder({"a.jsonl": '{"id": "\\ud800", "text": "a\\udc00b", "title": "\\ud800", "k\\ud800": "\\udfff"}'})
    document = only(root)
    assert document.text == "a\ufffdb"
    assert (document.title, document.metadata) == ("\ufffd", {"k\ufffd": "\ufffd"})
    for text in (document.id, document.source):
        assert text.encode().endswith("#\ufffd".encode())


# ---------------------------------------------------------------- new file types


def test_a_file_type_is_added_by_one_function(folder):
    @reader(".shout")
    def shout(data):
        if b"?" in data:
            raise Unreadable("it asks.")
        return Parsed(data.decode().upper(), "Loud", {"source": "somewhere", "k": 1})

    try:
        document = only(folder({"a.shout": "hey"}))
        assert (document.text, document.title, document.source) == ("HEY", "Loud", "somewhere")
        assert document.metadata == {"k": 1}
        assert why(folder({"a.shout": "hey?"})).endswith("cannot be read: it asks.")
    finally:
        del formats._things[".shout"]


def test_looking_at_files_imports_no_pdf_library():
    script = "import sys, lazyrag.loaders; assert not {'pypdf', 'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)
