//! `report.html`: one file that needs nothing else, neither a network nor fonts, and no JavaScript to be read.
//!
//! Colours are variables of the style sheet, so that one drawing is right in light, in dark and on paper. What a marker says when
//! pointed at is its SVG title; the script only shows it sooner and nearer.

mod figures;
mod head;
mod tables;

use std::fmt::Write as _;

use super::plot::escape;
use super::results::Results;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The whole page.
pub(super) fn page(results: &Results) -> String {
    let e = &results.environment;
    let title = format!("Doorbell sweep, {}", e.started.get(..10).unwrap_or(""));
    let mut body = String::new();
    head::write(&mut body, results);
    figures::write(&mut body, results);
    tables::write(&mut body, results);
    let mut out = String::with_capacity(body.len() + STYLE.len() + SCRIPT.len() + 1024);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        escape(&title)
    );
    out
}

/// `±3 %`, of a share; of a single measurement, that it is one.
fn plus_minus(share: Option<f64>) -> String {
    let Some(share) = share else {
        return "measured once".to_owned();
    };
    match 100.0 * share {
        p if p < 0.95 => format!("±{p:.1} %"),
        p if p >= 99.5 => "± more than 99 %".to_owned(),
        p => format!("±{p:.0} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::fixture;

    /// Tags that stand alone.
    const VOID: [&str; 5] = ["!doctype", "meta", "br", "path", "circle"];

    /// The names of unclosed elements, if any; a tag that does not match is an error.
    fn unclosed(page: &str) -> Vec<String> {
        let mut open: Vec<String> = Vec::new();
        let mut rest = page;
        while let Some(at) = rest.find('<') {
            rest = &rest[at + 1..];
            let end = rest.find('>').expect("a tag ends");
            let tag = &rest[..end];
            let name: String = tag
                .trim_start_matches('/')
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '!')
                .collect();
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "</{name}>");
            } else if !VOID.contains(&name.as_str()) {
                open.push(name.clone());
            }
            rest = &rest[end + 1..];
            // What is inside these is not markup.
            if name == "style" || name == "script" {
                rest = &rest[rest.find("</").expect("its end")..];
            }
        }
        open
    }

    #[test]
    fn the_page_is_well_formed_and_needs_nothing_else() {
        let page = page(&fixture::results());
        assert_eq!(unclosed(&page), [""; 0]);
        for outside in [
            "http://", "https://", "src=", "url(", "@import", "<link", "<img",
        ] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("prefers-color-scheme: dark"));
        assert!(page.contains("@media print"));
        assert!(!page.contains("NaN"), "every figure is one");
    }

    #[test]
    fn all_that_was_measured_is_in_it_and_what_was_named_is_escaped() {
        let results = fixture::results();
        let page = page(&results);
        for what in [
            "Puts against blocks",
            "Bandwidth of puts",
            "Latency",
            "Processor time",
            "Some CPU &amp; &lt;more&gt;",
        ] {
            assert!(page.contains(what), "{what}");
        }
        for point in &results.points {
            assert!(page.contains(&escape(&point.command)), "{}", point.command);
        }
    }

    #[test]
    fn a_sweep_that_was_cut_short_says_so_and_draws_what_there_is() {
        let mut results = fixture::results();
        results.complete = false;
        results.notes.push("A signal ended it early.".into());
        results.points[0].failed = Some("no <luck>".into());
        for point in &mut results.points[1..] {
            point.repetitions.clear();
            point.summarise();
        }
        let page = page(&results);
        assert_eq!(unclosed(&page), [""; 0]);
        for what in [
            "not complete",
            "A signal ended it early.",
            "no &lt;luck&gt;",
        ] {
            assert!(page.contains(what), "{what}");
        }
        results.points.clear();
        assert_eq!(unclosed(&super::page(&results)), [""; 0]);
    }
}
