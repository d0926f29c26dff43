//! Line charts as SVG, drawn here.
//!
//! Libraries that draw charts either bring a rasteriser and fonts for what is some paths and words, or need JavaScript from a network.
//! A report needs four kinds of axis, lines with markers and ranges, and colours that follow the page's style sheet (light, dark,
//! paper), which only SVG inside the page can; that is less than what using a library would take.

mod chart;
mod scale;

pub(super) use chart::{Chart, Look, Mark, Path, swatch};
pub(super) use scale::Scale;

/// `text` inside an element or an attribute.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_means_something_in_a_page_is_escaped() {
        assert_eq!(super::escape("a<b>&\"'é"), "a&lt;b&gt;&amp;&quot;&#39;é");
    }
}
