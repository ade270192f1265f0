import tarfile
import zipfile

import pytest

import packaging_checks

METADATA = """Metadata-Version: 2.4
Name: shoal
Version: 0
Author: The Shoal authors
{urls}
Description-Content-Type: text/markdown

{description}
"""


@pytest.fixture
def make_wheel(tmp_path):
    def make(description="# Shoal", urls=packaging_checks.URLS, without=()):
        path = tmp_path / "shoal.whl"
        urls = "\n".join(f"Project-URL: {name}, https://example.org" for name in urls)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                "shoal-0.dist-info/METADATA", METADATA.format(urls=urls, description=description)
            )
            package = packaging_checks.ROOT / "src"
            for file in (package / "shoal").rglob("*"):
                if file.is_file() and file.name not in without and "__pycache__" not in file.parts:
                    archive.writestr(file.relative_to(package).as_posix(), "")
        return path

    return make


@pytest.fixture
def make_sdist(tmp_path):
    def make(*names):
        path = tmp_path / "shoal.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(packaging_checks.ROOT / "src" / "shoal", "shoal-0/src/shoal")
            for name in names:
                archive.addfile(tarfile.TarInfo(f"shoal-0/{name}"))
        return path

    return make


def test_a_whole_package_passes(make_sdist, make_wheel):
    assert packaging_checks.check_contents(make_sdist(), make_wheel()) == []
    assert packaging_checks.check_metadata(make_wheel()) == []


def test_package_data_that_is_left_out_is_named(make_sdist, make_wheel):
    (said,) = packaging_checks.check_contents(make_sdist(), make_wheel(without=["page.css"]))
    assert said == "shoal/report/assets/page.css is not in the wheel."


def test_a_part_of_the_tests_is_no_suite(make_sdist, make_wheel):
    (said,) = packaging_checks.check_contents(make_sdist("tests/test_package.py"), make_wheel())
    assert said.startswith("tests/test_package.py is in the source distribution")


@pytest.mark.parametrize(
    ("description", "links"),
    [
        ('[a](https://x.org) [b](#there) <img src="http://x.org/a.png">', []),
        ("[a](docs/training.md) ![b](./c.png)", ["docs/training.md", "./c.png"]),
        ('<img src="docs/a.svg">', ["docs/a.svg"]),
    ],
)
def test_relative_links_in_the_description_are_named(make_wheel, description, links):
    assert packaging_checks.relative_links(description) == links
    assert len(packaging_checks.check_metadata(make_wheel(description))) == len(links)


def test_addresses_that_are_missing_are_named(make_wheel):
    (said,) = packaging_checks.check_metadata(make_wheel(urls=packaging_checks.URLS[1:]))
    assert "Homepage" in said
