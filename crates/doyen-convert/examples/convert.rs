//! Converts a checkpoint: `convert CHECKPOINT PACKAGE [--float] [--dtype T] [--experts W] [--layers ...]`.

use doyen_convert::{Options, Silent, Target, convert, options::LayerOverride, options::Setting};
use std::{error::Error, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: convert CHECKPOINT PACKAGE [--float] [--dtype T] [--experts W] [--embed W] [--lm-head W] \
                 [--set key=value] [--layers SPEC]";
    let checkpoint = args.next().ok_or(usage)?;
    let package = args.next().ok_or(usage)?;
    let mut options = Options::default();
    while let Some(flag) = args.next() {
        if flag == "--float" {
            options = Options::float(options.dtype);
            continue;
        }
        let value = args.next().ok_or(usage)?;
        match flag.as_str() {
            "--dtype" => options.dtype = Options::parse_dtype(&value)?,
            "--experts" => options.settings.extend(Setting::parse_experts(&value)?),
            "--embed" => options.embed = value.parse()?,
            "--lm-head" => options.lm_head = value.parse()?,
            "--set" => options.settings.push(value.parse()?),
            "--layers" => options.layers = LayerOverride::parse_list(&value)?,
            _ => return Err(usage.into()),
        }
    }
    let report = convert(Path::new(&checkpoint), &Target::new(package), &options, &mut Silent)?;
    for (part, bytes) in &report.parts {
        println!("{part:16} {bytes}");
    }
    println!("{:16} {}", "data file", report.data_file);
    for notice in &report.notices {
        println!("note: {notice}");
    }
    Ok(())
}
