//! One chart: frame, grid, ranges, lines, markers with what they say when pointed at.

use std::fmt::Write as _;

use super::{Scale, escape};

/// The drawing's own size; the page scales it.
const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 340.0;
/// Space around the frame: for the vertical axis's values and its name, the horizontal one's below.
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;

/// A chart, ready to be drawn.
pub(crate) struct Chart<'a> {
    /// What it shows, for who cannot see it.
    pub(crate) about: String,
    pub(crate) x: Scale,
    pub(crate) x_name: &'a str,
    pub(crate) x_words: &'a dyn Fn(f64) -> String,
    pub(crate) y: Scale,
    pub(crate) y_name: &'a str,
    pub(crate) y_words: &'a dyn Fn(f64) -> String,
    pub(crate) paths: Vec<Path>,
}

/// A line through marks.
pub(crate) struct Path {
    pub(crate) look: Look,
    pub(crate) marks: Vec<Mark>,
}

/// How a line looks: one of the numbered looks, or the dashed one of a baseline.
pub(crate) type Look = Option<usize>;

/// A measured value.
pub(crate) struct Mark {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Lowest and highest of the repetitions.
    pub(crate) range: Option<(f64, f64)>,
    /// What it says when pointed at.
    pub(crate) tip: String,
}

impl Chart<'_> {
    fn px(&self, x: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * self.x.place(x)
    }

    fn py(&self, y: f64) -> f64 {
        let place = self.y.place(y).clamp(-0.02, 1.02);
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * place
    }

    /// The whole drawing.
    pub(crate) fn svg(&self) -> String {
        let mut out = String::new();
        let _ = write!(
            out,
            r#"<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">"#,
            escape(&self.about)
        );
        self.axes(&mut out);
        for path in &self.paths {
            self.line(&mut out, path);
        }
        // Markers last: no line runs over another's.
        for path in &self.paths {
            self.marks(&mut out, path);
        }
        out.push_str("</svg>");
        out
    }

    fn axes(&self, out: &mut String) {
        let (left, right, bottom) = (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM);
        let (mut strong, mut faint) = (String::new(), String::new());
        for tick in self.y.ticks() {
            let y = self.py(tick.value);
            let grid = if tick.labelled {
                &mut strong
            } else {
                &mut faint
            };
            let _ = write!(grid, "M{left:.1} {y:.1}H{right:.1}");
            if tick.labelled {
                let _ = write!(
                    out,
                    r#"<text class="t" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                    left - 7.0,
                    y + 4.0,
                    escape(&(self.y_words)(tick.value))
                );
            }
        }
        let mut notches = String::new();
        for tick in self.x.ticks() {
            let x = self.px(tick.value);
            let _ = write!(strong, "M{x:.1} {TOP:.1}V{bottom:.1}");
            let _ = write!(notches, "M{x:.1} {bottom:.1}v4");
            if tick.labelled {
                let _ = write!(
                    out,
                    r#"<text class="t" x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                    bottom + 17.0,
                    escape(&(self.x_words)(tick.value))
                );
            }
        }
        let _ = write!(
            out,
            r#"<path class="g f" d="{faint}"/><path class="g" d="{strong}"/><path class="a" d="M{left} {bottom}H{right}{notches}"/>"#
        );
        let _ = write!(
            out,
            r#"<text class="n" x="0" y="14">{}</text><text class="n" x="{right}" y="{:.1}" text-anchor="end">{}</text>"#,
            escape(self.y_name),
            HEIGHT - 8.0,
            escape(self.x_name)
        );
    }

    fn line(&self, out: &mut String, path: &Path) {
        let class = class(path.look);
        let mut ranges = String::new();
        let mut line = String::new();
        for (i, mark) in path.marks.iter().enumerate() {
            let (x, y) = (self.px(mark.x), self.py(mark.y));
            let _ = write!(line, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
            if let Some((low, high)) = mark.range {
                let (low, high) = (self.py(low), self.py(high));
                // A range that its marker hides is not worth drawing.
                if low - high > 6.0 {
                    let _ = write!(
                        ranges,
                        "M{x:.1} {low:.1}V{high:.1}m-4 0h8m-8 {:.1}h8",
                        low - high
                    );
                }
            }
        }
        if !ranges.is_empty() {
            let _ = write!(out, r#"<path class="r {class}" d="{ranges}"/>"#);
        }
        let _ = write!(out, r#"<path class="l {class}" d="{line}"/>"#);
    }

    fn marks(&self, out: &mut String, path: &Path) {
        let class = class(path.look);
        for mark in &path.marks {
            let (x, y) = (self.px(mark.x), self.py(mark.y));
            // The invisible disc is what a finger or a pointer has to hit.
            let _ = write!(
                out,
                r#"<g class="m {class}" transform="translate({x:.1} {y:.1})"><title>{}</title><circle class="h" r="11"/>{}</g>"#,
                escape(&mark.tip),
                marker(path.look)
            );
        }
    }
}

fn class(look: Look) -> String {
    match look {
        Some(n) => format!("s{}", n % 6),
        None => "sb".to_owned(),
    }
}

/// The marker of a look, around the origin: shapes differ too, for who cannot tell the colours apart and for paper.
pub(crate) fn marker(look: Look) -> &'static str {
    match look.map(|n| n % 6) {
        Some(0) => r#"<circle r="4"/>"#,
        Some(1) => r#"<path d="M-3.7-3.7h7.4v7.4h-7.4z"/>"#,
        Some(2) => r#"<path d="M0-5L4.8 3.6H-4.8z"/>"#,
        Some(3) => r#"<path d="M0-5.2L5.2 0L0 5.2L-5.2 0z"/>"#,
        Some(4) => r#"<path d="M0 5L4.8-3.6H-4.8z"/>"#,
        Some(_) => r#"<path d="M-1.6-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z"/>"#,
        None => r#"<circle r="2"/>"#,
    }
}

/// A line of a legend, or of a table, with its look.
pub(crate) fn swatch(look: Look) -> String {
    let class = class(look);
    format!(
        r#"<svg class="swatch" viewBox="-14 -7 28 14" aria-hidden="true"><path class="l {class}" d="M-13 0H13"/><g class="m {class}">{}</g></svg>"#,
        marker(look)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[f64]) -> String {
        let words = |v: f64| format!("{v}<");
        Chart {
            about: "a \"chart\"".into(),
            x: Scale::at([1.0, 2.0, 4.0]).unwrap(),
            x_name: "blocks",
            x_words: &words,
            y: Scale::fit(values.iter().copied()).unwrap(),
            y_name: "rate",
            y_words: &words,
            paths: vec![Path {
                look: Some(0),
                marks: [1.0, 2.0, 4.0]
                    .into_iter()
                    .zip(values)
                    .map(|(x, y)| Mark {
                        x,
                        y: *y,
                        range: Some((y * 0.5, y * 1.5)),
                        tip: "a & b".into(),
                    })
                    .collect(),
            }],
        }
        .svg()
    }

    #[test]
    fn every_mark_is_drawn_inside_and_says_its_value() {
        for values in [[1.0, 2.0, 3.0], [1.0, 1e4, 1e9]] {
            let svg = chart(&values);
            assert_eq!(svg.matches("<title>a &amp; b</title>").count(), 3);
            assert_eq!(svg.matches("class=\"h\"").count(), 3);
            assert!(svg.contains("aria-label=\"a &quot;chart&quot;\""));
            for place in svg.split("translate(").skip(1) {
                let (x, rest) = place.split_once(' ').unwrap();
                let (y, _) = rest.split_once(')').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
                assert!((TOP - 7.0..=HEIGHT - BOTTOM).contains(&y), "{y}");
            }
        }
    }

    #[test]
    fn it_is_well_formed() {
        let svg = chart(&[1.0, 2.0, 3.0]);
        for (open, close) in [
            ("<svg", "</svg>"),
            ("<g ", "</g>"),
            ("<text", "</text>"),
            ("<title", "</title>"),
        ] {
            assert_eq!(
                svg.matches(open).count(),
                svg.matches(close).count(),
                "{open}"
            );
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
