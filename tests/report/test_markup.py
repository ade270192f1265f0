"""Whatever is put into an element is escaped, unless it is an element itself."""

from shoal.report.html.markup import Markup, element, folded, joined, table


def test_text_is_escaped_once_and_elements_stay():
    bold = element("b", "<i> & 'you'")
    assert bold == "<b>&lt;i&gt; &amp; &#x27;you&#x27;</b>"
    assert element("p", bold, "<") == f"<p>{bold}&lt;</p>"
    assert bold + "<" == f"{bold}&lt;"
    assert joined([bold, "", "<"], " ") == f"{bold} &lt;"
    assert all(isinstance(each, Markup) for each in (bold, bold + "<", joined(["<"])))


def test_attributes_are_escaped_and_those_without_a_value_left_out():
    assert (
        element("a", "x", title='"<"', href="", kind="of") == '<a class="of" title="&quot;&lt;&quot;">x</a>'
    )
    assert element("b", data_set=0, aria_label="y") == '<b data-set="0" aria-label="y"></b>'
    assert element("details", open=True) == "<details open></details>"
    assert element("details", open=False) == "<details></details>"


def test_nothing_is_folded_where_there_is_nothing_and_tables_scroll_by_themselves():
    assert folded("More", "") == ""
    rows = [element("tr", element("td", "<1>"))]
    content = "<thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody>"
    written = table([element("th", "a")], rows, "kind")
    assert written == f'<div class="scroll"><table class="kind">{content}</table></div>'
