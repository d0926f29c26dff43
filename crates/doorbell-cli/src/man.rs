//! Man pages: one for the command and one for each sub-command.
//!
//! Names, descriptions and options are rendered as clap describes them. The synopsis is written here, since options are of no use without their
//! values, and so is what stands behind the options: examples and tables of statuses keep their lines.

use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, Command};
use clap_mangen::Man;

/// Every page into a folder.
pub(crate) fn all(command: Command, folder: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    for sub in command.get_subcommands().filter(|s| !s.is_hide_set()) {
        one(sub, folder)?;
    }
    one(&command, folder)
}

fn one(command: &Command, folder: &Path) -> io::Result<()> {
    let name = Man::new(command.clone()).get_filename();
    let mut page = Vec::new();
    write(command.clone(), &mut page)?;
    std::fs::write(folder.join(name), page)
}

/// One page.
pub(crate) fn write(command: Command, out: &mut dyn Write) -> io::Result<()> {
    let mut built = command.clone();
    built.build();
    let man = Man::new(command);
    man.render_title(out)?;
    man.render_name_section(out)?;
    synopsis(&built, out)?;
    man.render_description_section(out)?;
    man.render_options_section(out)?;
    if built.get_subcommands().any(|s| !s.is_hide_set()) {
        man.render_subcommands_section(out)?;
    }
    if let Some(text) = built.get_after_help() {
        after(&text.to_string(), out)?;
    }
    writeln!(
        out,
        ".SH DOCUMENTATION\nPages such as faults.md lie where \\fBdoorbell path doc\\fR says."
    )?;
    if built.get_version().is_some() {
        man.render_version_section(out)?;
    }
    Ok(())
}

fn synopsis(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let mut words = vec![format!("\\fB{}\\fR", escape(name))];
    let seen = || command.get_arguments().filter(|a| !a.is_hide_set());
    words.extend(seen().filter(|a| !a.is_positional()).map(option));
    words.extend(seen().filter(|a| a.is_positional()).map(|a| {
        let value = format!("\\fI{}\\fR", escape(&value(a)));
        match a.is_required_set() {
            true => value,
            false => format!("[{value}]"),
        }
    }));
    if command.get_subcommands().any(|s| !s.is_hide_set()) {
        words.push("\\fICOMMAND\\fR".to_owned());
    }
    // An option and its value stay together: their space is one that no line is broken at.
    writeln!(out, ".SH SYNOPSIS\n.ad l\n{}\n.ad", words.join("\n"))
}

fn option(arg: &Arg) -> String {
    let name = match (arg.get_long(), arg.get_short()) {
        (Some(long), _) => format!("--{long}"),
        (None, Some(short)) => format!("-{short}"),
        (None, None) => arg.get_id().to_string(),
    };
    let mut text = format!("\\fB{}\\fR", escape(&name));
    if arg.get_action().takes_values() {
        text.push_str(&format!("\\ \\fI{}\\fR", escape(&value(arg))));
    }
    match arg.is_required_set() {
        true => text,
        false => format!("[{text}]"),
    }
}

/// What stands for its value.
fn value(arg: &Arg) -> String {
    match arg.get_value_names() {
        Some([name, ..]) => name.to_string(),
        _ => arg.get_id().to_string().to_uppercase(),
    }
}

/// What stands behind the options: line by line, its examples under a heading of their own.
fn after(text: &str, out: &mut dyn Write) -> io::Result<()> {
    let mut heading = None;
    for line in text.lines() {
        let wanted = match line {
            "Examples:" => Some("EXAMPLES"),
            _ if line.starts_with("Exit status") => Some("EXIT STATUS"),
            _ if !line.starts_with(' ') && !line.is_empty() && heading != Some("EXIT STATUS") => {
                Some("NOTES")
            }
            _ => None,
        };
        if let Some(wanted) = wanted.filter(|w| heading != Some(*w)) {
            if heading.is_some() {
                writeln!(out, ".fi")?;
            }
            writeln!(out, ".SH {wanted}\n.nf")?;
            heading = Some(wanted);
        }
        if line != "Examples:" && !(line.is_empty() && heading.is_none()) {
            writeln!(out, "{}", escape(line))?;
        }
    }
    match heading {
        Some(_) => writeln!(out, ".fi"),
        None => Ok(()),
    }
}

/// As roff takes it: hyphens that can be copied, backslashes, and no line that begins as a request does.
fn escape(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn page(name: &str) -> String {
        let mut command = crate::args::Cli::command();
        command.build();
        let command = match name {
            "" => command,
            name => command.find_subcommand(name).expect("it is one").clone(),
        };
        let mut out = Vec::new();
        write(command, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn options_have_their_values_and_examples_their_lines() {
        let perf = page("perf");
        assert!(
            perf.contains("[\\fB\\-\\-size\\fR\\ \\fILIST\\fR]"),
            "{perf}"
        );
        assert!(perf.contains("\\fITEST\\fR\n"), "{perf}");
        let sweep = page("sweep");
        let examples = sweep.split(".SH EXAMPLES\n.nf\n").nth(1).expect("examples");
        assert!(
            examples.starts_with("  doorbell sweep \\-\\-quick "),
            "{sweep}"
        );
        assert!(
            sweep.contains(".SH EXIT STATUS\n.nf\nExit status: 0"),
            "{sweep}"
        );
        assert_eq!(sweep.matches(".nf").count(), sweep.matches(".fi").count());
        assert!(!sweep.contains("EXTRA"));
        assert!(page("").contains("doorbell path doc"));
    }

    #[test]
    fn what_roff_would_take_for_its_own_is_escaped() {
        assert_eq!(escape(".x \\y -z"), "\\&.x \\ey \\-z");
    }
}
