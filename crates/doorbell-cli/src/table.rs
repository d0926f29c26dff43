//! A table for a terminal of 80 columns: aligned, with a rule under the header.
//! Rows are printed as they come, so column widths are fixed up front (a long run shows its
//! first row before its last is measured); a cell that does not fit pushes its row, never is cut.

use std::io::{self, Write};

/// How a column stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A column: its heading, the width of its widest expected cell, its alignment.
pub(crate) struct Column {
    pub(crate) head: &'static str,
    pub(crate) width: usize,
    pub(crate) align: Align,
}

impl Column {
    pub(crate) const fn left(head: &'static str, width: usize) -> Self {
        Self {
            head,
            width,
            align: Align::Left,
        }
    }

    pub(crate) const fn right(head: &'static str, width: usize) -> Self {
        Self {
            head,
            width,
            align: Align::Right,
        }
    }
}

/// Columns plus whether the terminal takes bold and dim.
pub(crate) struct Table {
    columns: Vec<Column>,
    styled: bool,
}

impl Table {
    /// `styled`: the output is a terminal and the user did not ask for plain text (`NO_COLOR`).
    pub(crate) fn new(columns: Vec<Column>, styled: bool) -> Self {
        Self { columns, styled }
    }

    /// Columns of a whole row, gaps included.
    pub(crate) fn width(&self) -> usize {
        let cells: usize = self.columns.iter().map(Column::span).sum();
        cells + 2 * self.columns.len().saturating_sub(1)
    }

    /// The heading and the rule below it.
    pub(crate) fn header(&self, out: &mut dyn Write) -> io::Result<()> {
        let heads: Vec<&str> = self.columns.iter().map(|c| c.head).collect();
        let line = self.line(&heads);
        let rule = "─".repeat(self.width());
        if self.styled {
            writeln!(out, "\x1b[1m{line}\x1b[0m\n\x1b[2m{rule}\x1b[0m")
        } else {
            writeln!(out, "{line}\n{rule}")
        }
    }

    /// One row; missing cells are blank.
    pub(crate) fn row(&self, out: &mut dyn Write, cells: &[String]) -> io::Result<()> {
        let cells: Vec<&str> = cells.iter().map(String::as_str).collect();
        writeln!(out, "{}", self.line(&cells))
    }

    fn line(&self, cells: &[&str]) -> String {
        let mut line = String::new();
        for (i, column) in self.columns.iter().enumerate() {
            if i > 0 {
                line.push_str("  ");
            }
            let cell = cells.get(i).copied().unwrap_or("");
            let pad = " ".repeat(column.span().saturating_sub(cell.chars().count()));
            match column.align {
                Align::Left => line.extend([cell, &pad]),
                Align::Right => line.extend([&*pad, cell]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

impl Column {
    fn span(&self) -> usize {
        self.width.max(self.head.chars().count())
    }
}

/// `name  value` lines, the values wrapped at the terminal's columns and aligned.
pub(crate) fn facts(out: &mut dyn Write, pairs: &[(String, String)]) -> io::Result<()> {
    let wide = pairs
        .iter()
        .map(|(name, _)| name.chars().count())
        .max()
        .unwrap_or(0);
    for (name, value) in pairs {
        let pad = " ".repeat(wide - name.chars().count());
        let mut first = true;
        for line in wrap(value, crate::out::columns().saturating_sub(wide + 4)) {
            if first {
                writeln!(out, "  {name}{pad}  {line}")?;
            } else {
                writeln!(out, "  {}  {line}", " ".repeat(wide))?;
            }
            first = false;
        }
    }
    Ok(())
}

/// Breaks at spaces; a word longer than the width stands alone.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligns_and_never_cuts() {
        let table = Table::new(
            vec![Column::left("name", 6), Column::right("size", 6)],
            false,
        );
        let mut out = Vec::new();
        table.header(&mut out).unwrap();
        table.row(&mut out, &["gpu".into(), "8 B".into()]).unwrap();
        table
            .row(&mut out, &["assisted".into(), "64 KiB".into()])
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "name      size");
        assert_eq!(lines[1].chars().count(), table.width());
        assert_eq!(lines[2], "gpu        8 B");
        assert_eq!(lines[3], "assisted  64 KiB");
    }

    #[test]
    fn wraps_at_words() {
        assert_eq!(wrap("aa bb cc", 5), ["aa bb", "cc"]);
        assert_eq!(wrap("averylongword b", 5), ["averylongword", "b"]);
        assert_eq!(wrap("", 5), [""]);
    }
}
