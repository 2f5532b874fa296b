@echo off
rem Opens the page with runs and this machine in the browser.   ui.bat [FOLDER] [options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=ui"
set LR_ARGS=%*
"%~dp0_run.bat"
